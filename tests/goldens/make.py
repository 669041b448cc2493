"""Writes the numbers of members and heads that transformers 5 has no class for.

NEZHA and Transformer-XL are classes of transformers 4.57, which live there under
transformers.models.deprecated; UniLM is its BERT, told pair by pair who sees whom;
SpanBERT's boundary head is in no version and is written out here. To write all files
again, or only those named (unilm boundary ...):

    python3.11 -m venv old-venv
    old-venv/bin/pip install torch==2.13.0 transformers==4.57.6 'numpy<3' safetensors
    old-venv/bin/python tests/goldens/make.py tests/goldens [NAME ...]

nezha.npz and transfo_xl.npz were written by 4.57.3, the others by 4.57.6.

Every parameter is moved by N(0, 0.05) from its initial value; then the queries and keys
of each layer are scaled until some attention probability of every row exceeds 0.5 (at
real tokens that see at least five keys), and the feed-forward weights of NEZHA so that
one form of gelu can be told from the other. The models run in float64 on parameters
that are float32, so the rounding in a comparison is all ours; the same in float32 must
agree. Numbers are stored as float32 (int32, bool, str); dropout is off.

Arrays are called CONFIGURATION/..., and tests/goldens/__init__.py reads them:
  config/KIND     text of the config.json of the class KIND
  names/KIND      every name of its state_dict, also those of tied or constant tensors
  param/NAME      parameters by their state_dict names, tied ones once
  in/..., out/... inputs and outputs
  grad/...        gradients, by the same names as the parameters
and sizes/NAME is the number of parameters of a published size (a tied one counts once).

nezha.npz: "clipped" (max_relative_position 5, gelu) and "far" (64, more than a row;
gelu_new; epsilon 1e-3). KINDs are pretraining (NezhaForPreTraining), classify, tag,
span, choice (NezhaForSequenceClassification, ...TokenClassification,
...QuestionAnswering, ...MultipleChoice), all on the body of the first; NAME of what
such a head has for itself is KIND:NAME, as in param/tag:classifier.weight.
SIDE is right or left, where the padding is:
  in/SIDE/ids types real [B, S]
  in/SIDE/lm_labels tag_labels [B, S]; -100 is not scored
  in/SIDE/nsp_labels classify_labels start_labels end_labels [B]
  in/SIDE/choice_labels [B/2]: rows 0 and 1 are the choices of the first question, ...
  out/SIDE/hidden [N+1, B, S, D]  attentions [N, B, H, S, S]  pooled [B, D]
  out/SIDE/lm [B, S, V]  nsp [B, 2]  classify [B, L]  tag [B, S, L]  span [B, S, 2]
  out/SIDE/choice [B/2, 2]
  out/SIDE/HEAD_loss: lm, nsp, classify, tag, span, choice; span is the mean of start
      and end, whose softmax is over real tokens (theirs is over padding too)
  grad/SIDE/NAME of the sum of the six losses
Theirs pools position 0. Here the pooler is given the first real token, which is the
same unless padding is on the left. No id is 0: torch keeps the gradient of a looked-up
padding row at zero.

transfo_xl.npz: "clamped" (distances above clamp_len do occur, the memory is shorter
than a piece), "unclamped" (they do not, the memory holds more than a piece, epsilon
1e-3) and "untied" (untie_r: u and v of each layer). All have cutoffs [] and div_val 1:
no adaptive softmax; d_embed == d_model; same_length False. The only KIND is lm
(TransfoXLLMHeadModel). Rows are batch-first; PIECE is first (its memory is empty, of
length 0) or second (its memory is out/first/mems):
  in/PIECE/ids labels [B, S]: the class shifts labels itself; -100 is not scored
  out/PIECE/hidden [N+1, B, S, D]  attentions [N, B, H, S, M+S], memory first
  out/PIECE/mems [N, B, M, D], what goes on to the next piece: inputs of the layers
  out/PIECE/log_probs [B, S, V]: what the class calls logits is after log_softmax
  out/PIECE/losses [B, S-1]: -log p(labels[:, 1:]), 0 where not scored
  out/PIECE/loss: the mean of the losses that are not 0
  grad/NAME of the loss of the second piece, whose memory has no gradient
  out/zeros/hidden attentions: the first piece without mems, as theirs runs it: it then
      sees mem_len memories that are zero vectors, which is not an empty memory
  out/same_length/hidden attentions ("untied"): the second piece with same_length True:
      a token sees itself and the mem_len - 1 before it

transfo_xl_classify.npz: "alone" (mem_len 0) and "memory" (a first piece was read, and
untie_r). KIND is classify (TransfoXLForSequenceClassification). As above, but
  in/second/ids: padding, with the id 0, is on the right, as the class takes it to be
  in/second/labels [B]
  out/second/hidden attentions classify [B, L] loss, grad/NAME

unilm.npz: "tiny". KIND is lm (BertForMaskedLM, six types), FORM one of UniLM's four
objectives. The last row is padded on the left, positions are 0..S-1 in any case:
  in/FORM/ids types real lm_labels [B, S]; sees [B, S, S]: query, key
  in/FORM/starts [B]: the place of the first word of the target
  out/FORM/hidden attentions lm loss; at padding they mean nothing
  grad/NAME of the sum of the four losses

boundary.npz: "tiny". KIND is pretraining: BertForMaskedLM with the boundary head of
facebookresearch/SpanBERT, pretraining/fairseq/models/pair_bert.py, under the head's
names there (its norms have gamma and beta). The last row is padded on the left:
  in/mixed/ids types real lm_labels [B, S]
  in/mixed/pairs [B, Q, 2]: the token before a span and the one after; 0 0 is none
  in/mixed/sbo_labels [B, Q, T]: its words, no more than T; -100 is not scored
  out/mixed/hidden attentions lm, sbo [B, Q, T, V]
  out/mixed/lm_loss, sbo_loss: the sum over (words + 1), as theirs; loss: their sum
  grad/NAME of the sum
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn import functional as F  # noqa: N812
from transformers import BertConfig, BertForMaskedLM
from transformers.models.deprecated.nezha import modeling_nezha as nezha
from transformers.models.deprecated.transfo_xl import modeling_transfo_xl as xl

NEEDS = "4.57."
SHARP = 0.5
FEWEST_KEYS = 5  # a token that sees fewer is sharp by itself
SIDES = {"right": (13, 9, 13, 6), "left": (13, 8, 5, 11)}  # real tokens of each row
LENGTH = 13
HEADS = {
    "pretraining": nezha.NezhaForPreTraining,
    "classify": nezha.NezhaForSequenceClassification,
    "tag": nezha.NezhaForTokenClassification,
    "span": nezha.NezhaForQuestionAnswering,
    "choice": nezha.NezhaForMultipleChoice,
}
NEZHA = {
    "clipped": dict(
        vocab_size=97,
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=17,
        max_relative_position=5,
        num_labels=3,
    ),
    "far": dict(
        vocab_size=53,
        hidden_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=28,
        max_position_embeddings=14,
        max_relative_position=64,
        type_vocab_size=3,
        hidden_act="gelu_new",
        layer_norm_eps=1e-3,
        num_labels=5,
    ),
}
XL = {
    "clamped": dict(
        vocab_size=97,
        d_model=36,
        n_head=3,
        d_inner=34,
        n_layer=2,
        mem_len=7,
        clamp_len=6,
        untie_r=False,
    ),
    "unclamped": dict(
        vocab_size=53,
        d_model=26,
        n_head=2,
        d_inner=28,
        n_layer=2,
        mem_len=17,
        clamp_len=1000,
        untie_r=False,
        layer_norm_epsilon=1e-3,
    ),
    "untied": dict(
        vocab_size=47,
        d_model=18,
        n_head=2,
        d_inner=22,
        n_layer=2,
        mem_len=9,
        clamp_len=12,
        untie_r=True,
    ),
}
XL_CLASSIFY = {
    "alone": dict(
        vocab_size=23,
        d_model=18,
        n_head=3,
        d_inner=22,
        n_layer=2,
        mem_len=0,
        clamp_len=6,
        untie_r=False,
        num_labels=3,
    ),
    "memory": dict(
        vocab_size=19,
        d_model=14,
        n_head=2,
        d_inner=17,
        n_layer=2,
        mem_len=7,
        clamp_len=12,
        untie_r=True,
        num_labels=5,
    ),
}
UNILM = dict(
    vocab_size=31,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=17,
    max_position_embeddings=13,
    type_vocab_size=6,
)
FORMS = {  # UniLM's objectives: the types of the source and of the target
    "bidirectional": (0, 1),
    "left_to_right": (2, 2),
    "right_to_left": (3, 3),
    "seq2seq": (4, 5),
}
UNILM_ROWS = ((0, 6, 13), (0, 4, 9), (3, 8, 13))  # begin of source, of target, end
SPANBERT = dict(
    vocab_size=29,
    hidden_size=14,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=20,
    max_position_embeddings=26,
)
SPANBERT_ROWS = ((0, 26), (0, 14), (9, 26))  # begin and end
SPANS = ([(2, 23)], [(3, 5), (9, 9)], [(12, 16), (20, 21)])  # first and last word
MAX_TARGETS, PLACE_SIZE = 20, 200  # the first span has more words than the head places


@contextlib.contextmanager
def repaired():
    """Repairs what stops the classes from running as they are.

    Transformer-XL calls type_as(dtype=...), which torch has never had, and makes its
    scores float32 before it hides any, where the float64 constant overflows.
    NezhaForMultipleChoice prints shapes.
    """
    type_as, single = torch.Tensor.type_as, torch.Tensor.float

    def either(self, other=None, *, dtype=None):
        return self.to(dtype) if other is None else type_as(self, other)

    torch.Tensor.type_as = either
    torch.Tensor.float = lambda self: (
        self if self.dtype == torch.float64 else single(self)
    )
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        torch.Tensor.type_as, torch.Tensor.float = type_as, single


def move(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)


def bend(body) -> None:
    """Scales the feed-forward layers of NEZHA, so that the form of gelu matters.

    The two forms differ by 5e-4 where |x| is about 2, and by nothing near 0.
    """
    with torch.no_grad():
        for layer in body.encoder.layer:
            layer.intermediate.dense.weight *= 5
            layer.output.dense.weight *= 4


def sharpen(weights: list[list[torch.Tensor]], highest) -> None:
    """Scales the q and k of each layer in turn, until highest(layer) is enough."""
    with torch.no_grad():
        for number, both in enumerate(weights):
            for _ in range(40):
                if highest(number) > SHARP:
                    break
                for weight in both:
                    weight *= 1.2
            assert highest(number) > SHARP, f"layer {number} cannot be made sharp"


def least_peak(attentions: torch.Tensor, counted: torch.Tensor) -> float:
    """Of the rows [B, H, S, K], the lowest peak, at the counted [B, S] queries."""
    peaks = attentions.amax((1, 3)) * counted
    return float(peaks.amax(1).min())


def run_twice(models: list, run) -> dict[str, np.ndarray]:
    """What run() gives in float64, after a look that float32 gives the same."""
    found = []
    for dtype in (torch.float32, torch.float64):
        for model in models:
            model.zero_grad()
            model.to(dtype)
        found.append({name: value.detach().numpy() for name, value in run().items()})
    single, double = found
    for name, value in double.items():
        # float32 rounds to 6e-8, and a gradient may be a sum that cancels.
        allowed = 3e-5 * max(1, np.abs(value).max())
        assert np.abs(single[name] - value).max() <= allowed, name
    return {name: value.astype(np.float32) for name, value in double.items()}


def text_of(model) -> np.ndarray:
    model.config.architectures = [type(model).__name__]
    text = model.config.to_json_string()
    assert json.loads(text)["model_type"]
    return np.array(text)


def nezha_rows(config, side: str, rng) -> dict[str, np.ndarray]:
    B, S, V, L = len(SIDES[side]), LENGTH, config.vocab_size, config.num_labels
    real = np.arange(S) < np.array(SIDES[side])[:, None]
    if side == "left":
        real = real[:, ::-1].copy()
    draw = lambda high, *shape: rng.integers(0, high, shape)  # noqa: E731
    lm = np.where(real & (rng.random((B, S)) < 0.3), draw(V, B, S), -100)
    lm[np.arange(B), real.argmax(1)] = draw(V, B)  # at least one a row
    spans = [np.sort(rng.choice(np.flatnonzero(row), 2)) for row in real]
    rows = {
        "ids": 1 + draw(V - 1, B, S),
        "types": draw(config.type_vocab_size, B, S),
        "lm_labels": lm,
        "tag_labels": np.where(real, draw(L, B, S), -100),
        "nsp_labels": np.arange(B) % 2,
        "classify_labels": draw(L, B),
        "start_labels": np.array(spans)[:, 0],
        "end_labels": np.array(spans)[:, 1],
        "choice_labels": np.array([1, 0]),
    }
    return {n: a.astype(np.int32) for n, a in rows.items()} | {"real": real}


def nezha_outputs(models: dict, rows: dict) -> dict[str, torch.Tensor]:
    """Every output and, named grad/NAME, every gradient of the sum of the losses."""
    given = {n: torch.tensor(a).long() for n, a in rows.items()}
    inputs = dict(
        input_ids=given["ids"],
        token_type_ids=given["types"],
        attention_mask=given["real"],
    )
    # Pairs of rows are the choices of a question.
    pairs = {n: a.reshape(-1, 2, a.shape[-1]) for n, a in inputs.items()}
    first = given["real"].argmax(1)
    every = torch.arange(len(first))
    body = models["pretraining"].nezha
    hook = body.pooler.register_forward_pre_hook(
        lambda _, states: (states[0][every, first][:, None],)
    )
    try:
        bare = body(**inputs, output_hidden_states=True, output_attentions=True)
        both = models["pretraining"](
            **inputs,
            labels=given["lm_labels"],
            next_sentence_label=given["nsp_labels"],
        )
        classify = models["classify"](**inputs, labels=given["classify_labels"])
        tag = models["tag"](**inputs, labels=given["tag_labels"])
        span = models["span"](**inputs)
        choice = models["choice"](**pairs, labels=given["choice_labels"])
    finally:
        hook.remove()
    lm, nsp = both.prediction_logits, both.seq_relationship_logits
    # Theirs lets padding take part in the softmax; its state means nothing.
    padding = given["real"] == 0
    start, end = (
        logits.masked_fill(padding, -torch.inf)
        for logits in (span.start_logits, span.end_logits)
    )
    span_losses = (
        F.cross_entropy(start, given["start_labels"]),
        F.cross_entropy(end, given["end_labels"]),
    )
    losses = {
        "lm_loss": F.cross_entropy(lm.flatten(0, 1), given["lm_labels"].flatten()),
        "nsp_loss": F.cross_entropy(nsp, given["nsp_labels"]),
        "classify_loss": classify.loss,
        "tag_loss": tag.loss,
        "span_loss": sum(span_losses) / 2,
        "choice_loss": choice.loss,
    }
    assert torch.isclose(losses["lm_loss"] + losses["nsp_loss"], both.loss)
    sum(losses.values()).backward()
    return {
        "hidden": torch.stack(bare.hidden_states),
        "attentions": torch.stack(bare.attentions),
        "pooled": bare.pooler_output,
        "lm": lm,
        "nsp": nsp,
        "classify": classify.logits,
        "tag": tag.logits,
        "span": torch.stack([span.start_logits, span.end_logits], -1),
        "choice": choice.logits,
        **losses,
        **{f"grad/{n}": p.grad for n, p in nezha_parameters(models).items()},
    }


def nezha_parameters(models: dict) -> dict[str, torch.nn.Parameter]:
    found = dict(models["pretraining"].named_parameters())
    for kind, model in models.items():
        if kind != "pretraining":
            for name, parameter in model.named_parameters():
                if not name.startswith("nezha."):
                    found[f"{kind}:{name}"] = parameter
    return found


def make_nezha(settings: dict, seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    models, arrays = {}, {}
    for kind, cls in HEADS.items():
        # The head of spans has num_labels outputs and breaks unless they are two.
        changes = {"num_labels": 2} if kind == "span" else {}
        model = cls(nezha.NezhaConfig(**settings | changes)).eval()
        move(model)
        arrays[f"config/{kind}"] = text_of(model)
        arrays[f"names/{kind}"] = np.array(list(model.state_dict()))
        models[kind] = model
    body = models["pretraining"].nezha
    for model in models.values():
        model.nezha = body
    bend(body)
    config = nezha.NezhaConfig(**settings)
    sides = {side: nezha_rows(config, side, rng) for side in SIDES}

    def highest(number: int) -> float:
        peaks = []
        for rows in sides.values():
            real = torch.tensor(rows["real"])
            ids, types = (torch.tensor(rows[n]).long() for n in ("ids", "types"))
            seen = body(ids, real.long(), types, output_attentions=True).attentions
            peaks.append(least_peak(seen[number], real))
        return min(peaks)

    layers = [layer.attention.self for layer in body.encoder.layer]
    sharpen([[layer.query.weight, layer.key.weight] for layer in layers], highest)
    for name, parameter in nezha_parameters(models).items():
        arrays[f"param/{name}"] = parameter.detach().numpy().copy()
    for side, rows in sides.items():
        arrays |= {f"in/{side}/{name}": array for name, array in rows.items()}
        run = lambda rows=rows: nezha_outputs(models, rows)  # noqa: E731
        for name, array in run_twice(list(models.values()), run).items():
            gradient = name.startswith("grad/")
            name = name.removeprefix("grad/")
            arrays[f"{'grad' if gradient else 'out'}/{side}/{name}"] = array
    return arrays


def xl_outputs(model, rows: dict) -> dict[str, torch.Tensor]:
    """Every output of both pieces, named PIECE/NAME."""
    body = model.transformer
    seen = dict(output_hidden_states=True, output_attentions=True)
    shape = (0, len(rows["first"]["ids"]), body.d_model)
    mems = [torch.zeros(shape, dtype=body.dtype)] * body.n_layer
    found = {}

    def keep(piece: str, out, names: tuple[str, ...]) -> None:
        for name in names:
            value = out[{"hidden": "hidden_states"}.get(name, name)]
            if isinstance(value, (tuple, list)):
                value = torch.stack(tuple(value))
            found[f"{piece}/{name}"] = value

    ids = torch.tensor(rows["first"]["ids"]).long()
    keep("zeros", body(ids, **seen), ("hidden", "attentions"))
    for piece in ("first", "second"):
        ids = torch.tensor(rows[piece]["ids"]).long()
        labels = torch.tensor(rows[piece]["labels"]).long()
        if piece == "second" and body.config.untie_r:
            body.same_length = True
            keep("same_length", body(ids, mems, **seen), ("hidden", "attentions"))
            body.same_length = False
        bare = body(ids, mems, **seen)
        out = model(ids, mems, labels=labels)
        keep(piece, bare, ("hidden", "attentions"))
        keep(piece, out, ("losses", "loss"))
        found[f"{piece}/mems"] = torch.stack(out.mems).transpose(1, 2)
        # Without labels: with them the class gives no predictions.
        found[f"{piece}/log_probs"] = model(ids, mems).prediction_scores
        mems = out.mems
    return found


def xl_config(settings: dict) -> xl.TransfoXLConfig:
    return xl.TransfoXLConfig(
        **settings,
        cutoffs=[],
        div_val=1,
        d_embed=settings["d_model"],
        d_head=settings["d_model"] // settings["n_head"],
        same_length=False,
    )


def xl_peak(attentions: torch.Tensor, real: torch.Tensor | bool = True) -> float:
    B, _, S, K = attentions.shape
    sees = (torch.arange(S) + 1 + K - S).expand(B, S)
    return least_peak(attentions, (sees >= FEWEST_KEYS) & real)


def xl_weights(model) -> list[list[torch.Tensor]]:
    """What sharpens each layer.

    q, k and v are one matrix: a view of its first two thirds. The positions are keys
    too, and with them scaled the gradients of r and v are not lost beside the rest.
    """
    D, layers = model.config.d_model, model.transformer.layers
    both = [layer.dec_attn for layer in layers]
    return [[a.qkv_net.weight.data[: 2 * D], a.r_net.weight] for a in both]


def make_xl(settings: dict, seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    V = settings["vocab_size"]
    model = xl.TransfoXLLMHeadModel(xl_config(settings)).eval()
    move(model)
    rows = {}
    for piece in ("first", "second"):
        ids = rng.integers(0, V, (3, 11)).astype(np.int32)
        rows[piece] = {"ids": ids, "labels": ids.copy()}
    rows["second"]["labels"][1, -2:] = -100

    def highest(number: int) -> float:
        seen = xl_outputs(model, rows)
        pieces = ("first", "second")
        return min(xl_peak(seen[f"{piece}/attentions"][number]) for piece in pieces)

    sharpen(xl_weights(model), highest)

    def run() -> dict[str, torch.Tensor]:
        found = xl_outputs(model, rows)
        found["second/loss"].backward()
        return found | {f"grad/{n}": p.grad for n, p in model.named_parameters()}

    arrays = {
        "config/lm": text_of(model),
        "names/lm": np.array(list(model.state_dict())),
    }
    for name, parameter in model.named_parameters():
        arrays[f"param/{name}"] = parameter.detach().numpy().copy()
    for piece in rows:
        for name, array in rows[piece].items():
            arrays[f"in/{piece}/{name}"] = array
    for name, array in run_twice([model], run).items():
        arrays[name if name.startswith("grad/") else f"out/{name}"] = array
    return arrays


def make_xl_classify(settings: dict, seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    V, L, M = (settings[name] for name in ("vocab_size", "num_labels", "mem_len"))
    config = xl_config(settings | {"pad_token_id": 0})
    model = xl.TransfoXLForSequenceClassification(config).eval()
    move(model)
    lengths = np.array([11, 7, 5])
    ids = rng.integers(1, V, (3, 11))
    rows = {
        "second/ids": np.where(np.arange(11) < lengths[:, None], ids, 0),
        "second/labels": rng.integers(0, L, 3),
    }
    if M:
        rows["first/ids"] = rng.integers(1, V, (3, 11))
    given = {name: torch.tensor(array) for name, array in rows.items()}

    def outputs() -> dict[str, torch.Tensor]:
        found, mems = {}, None
        if M:
            empty = [torch.zeros((0, 3, config.d_model), dtype=model.dtype)]
            before = model.transformer(given["first/ids"], empty * config.n_layer)
            mems = before.mems
            found["out/first/mems"] = torch.stack(mems).transpose(1, 2)
        out = model(
            given["second/ids"],
            mems,
            labels=given["second/labels"],
            output_hidden_states=True,
            output_attentions=True,
        )
        return found | {
            "out/second/hidden": torch.stack(out.hidden_states),
            "out/second/attentions": torch.stack(out.attentions),
            "out/second/classify": out.logits,
            "out/second/loss": out.loss,
        }

    def run() -> dict[str, torch.Tensor]:
        found = outputs()
        found["out/second/loss"].backward()
        return found | {f"grad/{n}": p.grad for n, p in model.named_parameters()}

    def highest(number: int) -> float:
        attentions = outputs()["out/second/attentions"][number]
        return xl_peak(attentions, given["second/ids"] > 0)

    sharpen(xl_weights(model), highest)
    arrays = stored(model, "classify")
    arrays |= {f"in/{name}": array.astype(np.int32) for name, array in rows.items()}
    return arrays | run_twice([model], run)


def stored(model, kind: str) -> dict[str, np.ndarray]:
    """The configuration, the names and the parameters of a model of one class."""
    arrays = {
        f"config/{kind}": text_of(model),
        f"names/{kind}": np.array(list(model.state_dict())),
    }
    for name, parameter in model.named_parameters():
        arrays[f"param/{name}"] = parameter.detach().numpy().copy()
    return arrays


# UniLM and SpanBERT: BERT, run with rows that have a form.


def may_see(form: str, query: int, other: int, start: int) -> bool:
    """UniLM (Dong et al. 2019, section 2.2): whether one real token sees another."""
    if form == "left_to_right":
        return other <= query
    if form == "right_to_left":
        return other >= query
    if form == "seq2seq":
        # The source is seen by all; a word of the target by itself and later ones.
        return other < start or start <= other <= query
    return True


def bert_rows(settings: dict, real: np.ndarray, scored: np.ndarray, rng) -> dict:
    (B, S), V = real.shape, settings["vocab_size"]
    return {
        "ids": rng.integers(1, V, (B, S)),
        "types": np.zeros((B, S), int),
        "real": real,
        "lm_labels": np.where(scored & real, rng.integers(0, V, (B, S)), -100),
    }


def unilm_rows(form: str, rng) -> dict[str, np.ndarray]:
    B, S = len(UNILM_ROWS), UNILM["max_position_embeddings"]
    sees, real = np.zeros((B, S, S), bool), np.zeros((B, S), bool)
    types = np.zeros((B, S), int)
    for b, (begin, start, end) in enumerate(UNILM_ROWS):
        real[b, begin:end] = True
        types[b, :start], types[b, start:] = FORMS[form]
        for query in range(begin, end):
            for other in range(begin, end):
                sees[b, query, other] = may_see(form, query, other, start)
    rows = bert_rows(UNILM, real, rng.random((B, S)) < 0.5, rng)
    starts = np.array([start for _, start, _ in UNILM_ROWS])
    return rows | {"types": types, "sees": sees, "starts": starts}


def spanbert_rows(rng) -> dict[str, np.ndarray]:
    B, S = len(SPANBERT_ROWS), SPANBERT["max_position_embeddings"]
    Q, T = max(map(len, SPANS)), MAX_TARGETS
    real, inside = np.zeros((B, S), bool), np.zeros((B, S), bool)
    for b, (begin, end) in enumerate(SPANBERT_ROWS):
        real[b, begin:end] = True
        for first, last in SPANS[b]:
            inside[b, first : last + 1] = True
    rows = bert_rows(SPANBERT, real, inside, rng)
    rows["types"] = rng.integers(0, 2, (B, S))
    pairs, labels = np.zeros((B, Q, 2), int), np.full((B, Q, T), -100)
    for b, spans in enumerate(SPANS):
        for n, (first, last) in enumerate(spans):
            pairs[b, n] = first - 1, last + 1
            words = rows["lm_labels"][b, first : last + 1][:T]
            labels[b, n, : len(words)] = words
    return rows | {"pairs": pairs, "sbo_labels": labels}


class Norm(torch.nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(size))
        self.beta = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return self.gamma * x + self.beta


class Boundary(torch.nn.Module):
    """Scores every word that a span may have, from the states beside it.

    norm(gelu(W2 norm(gelu(W1 [left; right; place])))), then the table of words.
    """

    def __init__(self, table: torch.nn.Parameter):
        super().__init__()
        V, D = table.shape
        self.position_embeddings = torch.nn.Embedding(MAX_TARGETS, PLACE_SIZE)
        layers = {
            "linear1": torch.nn.Linear(2 * D + PLACE_SIZE, D),
            "layer_norm1": Norm(D),
            "linear2": torch.nn.Linear(D, D),
            "layer_norm2": Norm(D),
        }
        self.mlp_layer_norm = torch.nn.ModuleDict(layers)
        self.decoder = torch.nn.Linear(D, V, bias=False)
        self.decoder.weight = table
        self.bias = torch.nn.Parameter(torch.zeros(V))
        with torch.no_grad():  # so that the form of gelu matters, as in bend()
            layers["linear1"].weight *= 3
            layers["linear2"].weight *= 5

    def forward(self, states, pairs):
        every = torch.arange(len(states))[:, None]
        borders = [states[every, pairs[..., side]] for side in (0, 1)]  # [B, Q, D]
        x = torch.cat(borders, -1)[:, :, None].expand(-1, -1, MAX_TARGETS, -1)
        places = self.position_embeddings.weight.expand(*x.shape[:3], -1)
        x, layers = torch.cat([x, places], -1), self.mlp_layer_norm
        for n in "12":
            x = layers[f"layer_norm{n}"](F.gelu(layers[f"linear{n}"](x)))
        return self.decoder(x) + self.bias  # [B, Q, T, V]


def bert_outputs(model, rows: dict) -> dict[str, torch.Tensor]:
    given = {n: torch.tensor(a).long() for n, a in rows.items()}
    out = model(
        given["ids"],
        attention_mask=given.get("sees", given["real"]),
        token_type_ids=given["types"],
        labels=given["lm_labels"],
        output_hidden_states=True,
        output_attentions=True,
    )
    found = {
        "hidden": torch.stack(out.hidden_states),
        "attentions": torch.stack(out.attentions),
        "lm": out.logits,
    }
    if "pairs" not in given:
        return found | {"loss": out.loss}
    head, labels = model.cls.pair_target_predictions, given["sbo_labels"]
    sbo = head(out.hidden_states[-1], given["pairs"])
    each = F.cross_entropy(sbo.flatten(0, 2), labels.flatten(), reduction="sum")
    loss = each / ((labels >= 0).sum() + 1)
    return found | {
        "sbo": sbo,
        "lm_loss": out.loss,
        "sbo_loss": loss,
        "loss": out.loss + loss,
    }


def bert(settings: dict):
    config = BertConfig(**settings, attn_implementation="eager")
    return BertForMaskedLM(config).eval()


def make_bert(model, kind: str, sets: dict[str, dict]) -> dict[str, np.ndarray]:
    """Of a model and the rows that it reads, by name."""
    move(model)

    def highest(number: int) -> float:
        peaks = []
        for rows in sets.values():
            real = rows["real"]
            keys = rows.get("sees", real[:, None] & real[:, :, None]).sum(-1)
            seen = bert_outputs(model, rows)["attentions"][number]
            peaks.append(least_peak(seen, torch.tensor(keys >= FEWEST_KEYS)))
        return min(peaks)

    layers = [layer.attention.self for layer in model.bert.encoder.layer]
    sharpen([[layer.query.weight, layer.key.weight] for layer in layers], highest)

    def run() -> dict[str, torch.Tensor]:
        found = {
            f"out/{name}/{key}": value
            for name, rows in sets.items()
            for key, value in bert_outputs(model, rows).items()
        }
        sum(found[f"out/{name}/loss"] for name in sets).backward()
        return found | {f"grad/{n}": p.grad for n, p in model.named_parameters()}

    arrays = stored(model, kind)
    for name, rows in sets.items():
        for field, array in rows.items():
            array = array if array.dtype == bool else array.astype(np.int32)
            arrays[f"in/{name}/{field}"] = array
    return arrays | run_twice([model], run)


def make_unilm(seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    sets = {form: unilm_rows(form, rng) for form in FORMS}
    return make_bert(bert(UNILM), "lm", sets)


def make_boundary(seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    model = bert(SPANBERT)
    table = model.bert.embeddings.word_embeddings.weight
    model.cls.pair_target_predictions = Boundary(table)
    rows = spanbert_rows(np.random.default_rng(seed))
    return make_bert(model, "pretraining", {"mixed": rows})


def count(cls, config) -> np.ndarray:
    """The number of parameters, without making any."""
    with torch.device("meta"):
        model = cls(config)
    return np.array(sum(p.numel() for p in model.parameters()))


def nezha_sizes() -> dict[str, np.ndarray]:
    # The table of positions is no parameter, and it is large: so it is kept short.
    base = nezha.NezhaConfig(max_position_embeddings=1)
    large = nezha.NezhaConfig(
        max_position_embeddings=1,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    return {
        f"nezha-cn-{size}/{cls.__name__}": count(cls, config)
        for size, config in {"base": base, "large": large}.items()
        for cls in (nezha.NezhaModel, nezha.NezhaForPreTraining)
    }


def xl_sizes() -> dict[str, np.ndarray]:
    # The default config is that of wt103; "plain" is it without clusters.
    configs = {
        "wt103": xl.TransfoXLConfig(),
        "wt103-plain": xl.TransfoXLConfig(cutoffs=[], div_val=1),
        "wt103-plain-tied": xl.TransfoXLConfig(cutoffs=[], div_val=1, untie_r=False),
    }
    return {
        f"{name}/{cls.__name__}": count(cls, config)
        for name, config in configs.items()
        for cls in (xl.TransfoXLModel, xl.TransfoXLLMHeadModel)
    }


def write(path: Path, configurations: dict[str, dict[str, np.ndarray]]) -> None:
    arrays = {
        f"{configuration}/{name}": array
        for configuration, named in configurations.items()
        for name, array in named.items()
    }
    np.savez_compressed(path, **arrays)
    print(f"{path}: {len(arrays)} arrays, {path.stat().st_size:,} bytes")


def each(make, settings: dict[str, dict], seed: int) -> dict[str, dict]:
    return {n: make(s, seed + i) for i, (n, s) in enumerate(settings.items())}


FILES = {
    "nezha": lambda: each(make_nezha, NEZHA, 10) | {"sizes": nezha_sizes()},
    "transfo_xl": lambda: each(make_xl, XL, 20) | {"sizes": xl_sizes()},
    "transfo_xl_classify": lambda: each(make_xl_classify, XL_CLASSIFY, 30),
    "unilm": lambda: {"tiny": make_unilm(40)},
    "boundary": lambda: {"tiny": make_boundary(50)},
}


def main(out: str, *names: str) -> None:
    if not transformers.__version__.startswith(NEEDS):
        sys.exit(f"transformers {NEEDS}x is needed, not {transformers.__version__}")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names or FILES:
        with repaired():
            made = FILES[name]()
        write(Path(out) / f"{name}.npz", made)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not {*sys.argv[2:]} <= {*FILES}:
        sys.exit(f"usage: python tests/goldens/make.py OUT [{' '.join(FILES)}]")
    main(*sys.argv[1:])
