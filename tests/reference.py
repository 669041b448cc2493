"""The reference the numbers are compared with: tiny BERTs of transformers.

Fresh weights hide errors: every bias is 0, every norm is 1, attention is uniform. So
every parameter is moved by N(0, 0.05), and the queries and keys of each layer are
scaled until some attention probability of every row exceeds 0.5.
"""

import dataclasses
import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model, init_params
from bert_jax.models.tokens import Tokens
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.parity import GRADIENT, OUTPUT, QUICK, SHARP, excess
from bert_jax.step import Net

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

HEADS = ("lm", "pooler", "nsp")
THEIR_ACTIVATION = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


def their_config(arch: Arch) -> transformers.BertConfig:
    """The config of theirs, written out by hand: no code of ours is trusted here."""
    return transformers.BertConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.width,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        intermediate_size=arch.inner,
        max_position_embeddings=arch.max_positions,
        type_vocab_size=arch.types,
        hidden_act=THEIR_ACTIVATION[arch.activation],
        layer_norm_eps=arch.norm_eps,
        hidden_dropout_prob=arch.dropout,
        attention_probs_dropout_prob=arch.attention_dropout,
        initializer_range=arch.init_std,
        num_labels=arch.labels,
        attn_implementation="eager",
    )


def reference_model(
    arch: Arch, *, seed: int = 0, kind: str = "BertForPreTraining", **options
):
    """A model of theirs, moved away from its initial weights and sharpened."""
    torch.manual_seed(seed)
    cls = getattr(transformers, kind)
    model = cls._from_config(their_config(arch), **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    sharpen(model, arch)
    return model


def sharpen(model, arch: Arch) -> None:
    """Scales q and k of each layer in turn, until every one of four rows is sharp.

    The rows are as long as can be: a short one is sharp by itself.
    """
    body = getattr(model, "bert", model)
    ids = torch.randint(0, arch.vocab_size, (4, arch.max_positions))
    for number, layer in enumerate(body.encoder.layer):
        for _ in range(40):
            with torch.no_grad():
                seen = body(ids, output_attentions=True).attentions[number]
                if seen.amax((1, 2, 3)).min() > SHARP:
                    break
                layer.attention.self.query.weight *= 1.2
                layer.attention.self.key.weight *= 1.2


def tensors_of(model) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def ours_from(model, arch: Arch) -> dict:
    tensors = tensors_of(model)
    return engine.to_ours(tensors, arch, LAYOUTS["bert"], source="the reference")


def theirs_from(params: dict, arch: Arch) -> dict[str, np.ndarray]:
    """Our tree (of parameters, or gradients) under their names."""
    theirs, rest = engine.to_theirs(params, arch, LAYOUTS["bert"], heads=HEADS)
    assert not rest
    return theirs


def fresh_params(arch: Arch, *, heads: tuple[str, ...] = HEADS, seed: int = 0) -> dict:
    """Initial parameters of ours, as numpy arrays."""
    init = partial(init_params, Model(arch), heads=heads)
    draw = jax.jit(init, compiler_options=QUICK)
    return jax.device_get(draw(jax.random.key(seed)))


@dataclasses.dataclass
class Rows:
    """A corrupted batch as the objective scores it, one example a row."""

    ids: np.ndarray  # [B, S]
    types: np.ndarray
    real: np.ndarray  # bool [B, S]
    where: np.ndarray  # [B, P]
    targets: np.ndarray
    weights: np.ndarray
    next_sentence: np.ndarray  # [B, 1]

    @property
    def positions(self) -> np.ndarray:
        B, S = self.ids.shape
        return np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))

    @property
    def first(self) -> np.ndarray:
        """Where each example starts: [B, 1]."""
        return self.real.argmax(1)[:, None].astype(np.int32)

    @property
    def labels(self) -> np.ndarray:
        """Targets at predicted positions, -100 elsewhere: [B, S]."""
        labels = np.full(self.ids.shape, -100, np.int64)
        for row in range(len(labels)):
            filled = self.weights[row] > 0
            labels[row, self.where[row, filled]] = self.targets[row, filled]
        return labels

    def batch(self) -> dict[str, np.ndarray]:
        return {
            "ids": self.ids,
            "types": self.types,
            "positions": self.positions,
            "group": self.real.astype(np.int32),
            "first": self.first,
            "where": self.where,
            "targets": self.targets,
            "weights": self.weights,
            "next_sentence": self.next_sentence,
        }


def random_rows(
    arch: Arch, lengths: list[int], length: int, *, side: str = "right", seed: int = 0
) -> Rows:
    """Rows with that many real tokens; padding holds ids like any others.

    Only never [PAD], 0: torch keeps the gradient of a looked-up padding row at zero.
    """
    rng = np.random.default_rng(seed)
    B, S, P = len(lengths), length, 5
    real = np.arange(S) < np.asarray(lengths)[:, None]
    if side == "left":
        real = real[:, ::-1]
    where, weights = np.zeros((B, P), np.int32), np.zeros((B, P), np.float32)
    for row in range(B):
        count = min(P, max(1, lengths[row] // 4))
        places = rng.choice(np.flatnonzero(real[row]), count, replace=False)
        where[row, :count], weights[row, :count] = np.sort(places), 1.0
    draw = lambda high, shape: rng.integers(0, high, shape).astype(np.int32)  # noqa: E731
    return Rows(
        ids=1 + draw(arch.vocab_size - 1, (B, S)),
        types=draw(arch.types, (B, S)),
        real=real,
        where=where,
        targets=draw(arch.vocab_size, (B, P)),
        weights=weights,
        next_sentence=draw(2, (B, 1)),
    )


def their_results(model, rows: Rows) -> dict[str, dict[str, np.ndarray]]:
    """Outputs of every kind and the gradient of every parameter, by their names."""
    model.zero_grad()
    inputs = dict(
        input_ids=torch.tensor(rows.ids),
        token_type_ids=torch.tensor(rows.types),
        position_ids=torch.tensor(rows.positions.copy()),
        attention_mask=torch.tensor(rows.real.astype(np.int64)),
    )
    labels = torch.tensor(rows.labels)
    pairs = torch.tensor(rows.next_sentence[:, 0]).long()
    seen = dict(output_hidden_states=True, output_attentions=True)
    body = model.bert(**inputs, **seen)
    first = torch.tensor(rows.first[:, 0]).long()
    start = body.last_hidden_state[torch.arange(len(first)), first]
    pooled = model.bert.pooler(start[:, None])
    if (rows.first == 0).all():
        whole = model(**inputs, labels=labels, next_sentence_label=pairs)
        loss, lm = whole.loss, whole.prediction_logits
        nsp = whole.seq_relationship_logits
    else:
        # Their model pools the token at 0, which is padding here: its parts, instead.
        lm, nsp = model.cls(body.last_hidden_state, pooled)
        score = torch.nn.functional.cross_entropy
        loss = score(lm.flatten(0, 1), labels.flatten()) + score(nsp, pairs)
    loss.backward()
    arrays = {
        "loss": loss,
        "hidden": torch.stack(body.hidden_states),
        "attentions": torch.stack(body.attentions),
        "pooler": pooled,
        "lm": lm,
        "nsp": nsp,
    }
    gradients = {
        name: parameter.grad.numpy().copy()
        for name, parameter in model.named_parameters()
    }
    outputs = {name: value.detach().numpy() for name, value in arrays.items()}
    return {"outputs": outputs, "gradients": gradients}


def objective_of(arch: Arch) -> MaskedLM:
    return MaskedLM(arch.vocab_size, mask_id=4, special_ids=(0, 2, 3))


def tokens_of(batch) -> Tokens:
    rank = jnp.zeros_like(batch["ids"])
    fields = ("ids", "types", "positions", "group")
    return Tokens(**{name: batch[name] for name in fields}, rank=rank)


@lru_cache
def our_function(arch: Arch, dtype=jnp.float32):
    """(params, batch, noise) -> outputs and gradients, in one jitted function."""
    model = Model(arch, dtype=dtype)
    objective = objective_of(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params, batch, noise):
        def loss(params):
            net = Net(model, params, noise)
            return loss_of(objective, objective.terms(net, batch).means)

        value, gradients = jax.value_and_grad(loss)(params)
        out = model.apply(
            {"params": params},
            tokens_of(batch),
            first=batch["first"],
            heads=HEADS,
            capture=("hidden", "attentions"),
            noise=noise,
        )
        return {"outputs": out | {"loss": value}, "gradients": gradients}

    return compute


def our_results(
    arch: Arch, params: dict, batch: dict, *, noise=None, dtype=jnp.float32
) -> dict[str, dict]:
    """The same of ours as `their_results`; gradients as our tree."""
    return jax.device_get(our_function(arch, dtype)(params, batch, noise))


def compare(arch: Arch, ours: dict, theirs: dict, rows: Rows) -> dict[str, float]:
    """Every output at real positions and every gradient: name -> excess."""
    real, V = rows.real, arch.vocab_size
    a, b = ours["outputs"], theirs["outputs"]
    found = {
        "loss": excess(a["loss"], b["loss"], **OUTPUT),
        "pooler": excess(a["pooler"][:, 0], b["pooler"], **OUTPUT),
        "nsp": excess(a["nsp"][:, 0], b["nsp"], **OUTPUT),
        "lm": excess(a["lm"][real][:, :V], b["lm"][real], **OUTPUT),
    }
    for n in range(arch.layers + 1):
        pair = (side["hidden"][n][real] for side in (a, b))
        found[f"hidden {n}"] = excess(*pair, **OUTPUT)
    for n in range(arch.layers):  # [B, S_q, H, S_k] at real q
        pair = (side["attentions"][n].swapaxes(1, 2)[real] for side in (a, b))
        found[f"attentions {n}"] = excess(*pair, **OUTPUT)
    return found | compare_gradients(arch, ours["gradients"], theirs["gradients"])


def compare_gradients(arch: Arch, ours: dict, theirs: dict) -> dict[str, float]:
    """By their names; their list of parameters and ours must be the same."""
    named = theirs_from(ours, arch)
    assert named.keys() == theirs.keys()
    return {
        f"gradient {name}": excess(named[name], theirs[name], **GRADIENT)
        for name in named
    }


def failures(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not value <= 1}


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COLLECTIVES += ("collective-permute", "collective-broadcast", "ragged-all-to-all")


def collectives_in(text: str) -> dict[str, list[str]]:
    """The kinds of collectives in a compiled program, each with the shapes it sends."""
    found: dict[str, list[str]] = {}
    for kind in COLLECTIVES:
        shapes = re.findall(rf"= (\(?\S.*?) {kind}(?:-start)?\(", text)
        if shapes:
            found[kind] = shapes
    return found


def shardings(devices=None) -> tuple[NamedSharding, NamedSharding]:
    """Of parameters (a copy on each device) and of a batch (its rows split)."""
    devices = jax.devices()[:8] if devices is None else devices
    assert len(devices) >= 4, "conftest.py makes eight"
    mesh = jax.make_mesh(
        (len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices
    )
    return NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))


def assert_devices_do_not_talk(function, batch: dict) -> None:
    """Eight devices with two rows each compute what one does, each for itself."""
    _, split = shardings()
    placed = jax.device_put(batch, split)
    compiled = jax.jit(function, out_shardings=split).lower(placed).compile()
    assert "num_partitions=8" in compiled.as_text()
    assert not collectives_in(compiled.as_text())
    expected = jax.device_get(jax.jit(function)(batch))
    for name, value in jax.device_get(compiled(placed)).items():
        np.testing.assert_array_equal(value, expected[name])
