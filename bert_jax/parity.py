"""Does our model compute what PyTorch's computes? Measured, on the same weights.

Fresh weights hide errors: every bias is 0, every norm is 1, attention is uniform. So
every parameter is moved by N(0, 0.05), and the queries and keys of each layer are
scaled until some attention probability of every row exceeds 0.5. Compared, in f32, at
real positions: every hidden state and logit, max|a-b| <= 1e-5 max(1, max|b|) for up to
four layers, and the gradient of the sum of all losses, max|a-b| <= 1e-4 max|b| + 1e-7.
"""

import dataclasses
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.convert.engine import (
    class_for,
    flatten,
    paths,
    put_out,
    reference_heads,
    take_in,
    to_ours,
    to_theirs,
)
from bert_jax.convert.hf import config_of
from bert_jax.convert.tables import LAYOUTS, Layout
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.heads import BY_PIECE, HEADS, ON_POOLED
from bert_jax.models.model import Model, count_params, init_params
from bert_jax.models.tokens import Tokens, counted, plain
from bert_jax.presets import Preset

OUTPUT = dict(relative=1e-5, floor=1.0, absolute=0.0)
GRADIENT = dict(relative=1e-4, floor=0.0, absolute=1e-7)
SIDES = ("right", "left")  # of padding
SHARP = 0.5  # what the largest attention probability exceeds, in every layer
# A quarter of the time to compile; what is compiled is the same program.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def tiny(arch: Arch) -> Arch:
    """The same choices at odd sizes, small enough to measure in seconds."""
    group = arch.group_layers
    return arch.but(
        vocab_size=211,
        width=48,
        layers=max(2, 2 * group),
        heads=3,
        inner=192 if arch.order == "causal" else 80,
        max_positions=40 + arch.position_offset,
        embed_width=arch.embed_width and 20,
        max_distance=arch.max_distance and 7,
        window=8,
        labels=3,
        types=min(arch.types, 6),
        task_types=min(arch.task_types, 4),
        dropout=0.0,
        attention_dropout=0.0,
    )


# The rows that both sides read, and what they are to answer.


@dataclasses.dataclass
class Rows:
    """One example a row. Arrays [B, S]."""

    ids: np.ndarray
    types: np.ndarray
    real: np.ndarray  # bool
    task: np.ndarray
    reach: np.ndarray
    labels: dict[str, np.ndarray]  # by head; -100 is not asked for

    def tokens(self, arch: Arch) -> Tokens:
        positions = counted(self.real) if arch.position_offset else None
        tokens = plain(
            self.ids,
            types=self.types,
            real=self.real,
            order=arch.order,
            positions=positions,
        )
        return tokens.replace(
            task=jnp.asarray(self.task) if arch.task_types else None,
            reach=jnp.asarray(self.reach) if arch.attention == "window" else None,
        )

    def pooled(self, arch: Arch) -> bool:
        """Whether the token that is pooled is real in every row: theirs pools the
        first, or last, of a row, be it padding or not. (GPT looks for it.)"""
        if arch.order == "causal":
            return True
        return bool(self.real[:, 0 if arch.pool_from == "first" else -1].all())


def random_rows(
    arch: Arch, lengths: list[int], length: int, *, side: str = "right", seed: int = 0
) -> Rows:
    """Rows with that many real tokens. Padding holds ids like any others, except where
    theirs finds padding by its id. No real token is padding's: torch keeps the gradient
    of its row at zero."""
    rng = np.random.default_rng(seed)
    B, S = len(lengths), length
    pad_id = max(0, arch.position_offset - 1)
    real = np.arange(S) < np.asarray(lengths)[:, None]
    if side == "left":
        real = real[:, ::-1].copy()

    def draw(high: int, shape=(B, S)) -> np.ndarray:
        return rng.integers(0, high, shape).astype(np.int32)

    ids = draw(arch.vocab_size - 1)
    ids += ids >= pad_id
    if arch.position_offset or arch.order == "causal":
        ids = np.where(real, ids, pad_id)
    reach = ((rng.random((B, S)) < 0.1) & real).astype(np.int32)
    # Of a left-to-right model no first token is asked for: there is nothing before it.
    may = real & np.roll(real, 1, axis=1) if arch.order == "causal" else real
    asked = may & (rng.random((B, S)) < 0.3)
    asked[np.arange(B), [rng.choice(np.flatnonzero(row)) for row in may]] = True
    answers = np.stack([rng.choice(np.flatnonzero(row), 2) for row in real])
    labels = {
        "lm": np.where(asked, draw(arch.vocab_size), -100),
        "nsp": draw(2, B),
        "sop": draw(2, B),
        "rtd": draw(2),
        "classify": draw(arch.labels, B),
        "tag": np.where(real, draw(arch.labels), -100),
        "span": answers,  # [B, 2]
        "choice": draw(2, B // 2),
        "answer": draw(2, B),  # whether there is none
    }
    types = draw(max(1, arch.types))
    return Rows(ids, types, real, draw(max(1, arch.task_types)), reach, labels)


# Ours.


def sharp_params(arch: Arch, *, heads: tuple[str, ...], seed: int = 0) -> dict:
    """Parameters moved away from where they start, with sharp attention."""
    model = Model(arch.but(stack="loop"))
    params = jax.device_get(init_params(model, jax.random.key(seed), heads=heads))
    rng = np.random.default_rng(seed)
    flat = flatten(params)
    for name, leaf in flat.items():
        leaf = leaf + rng.normal(0, 0.05, leaf.shape).astype(np.float32)
        if name.endswith(BY_PIECE):
            leaf[arch.vocab_size :] = 0
        flat[name] = leaf
    S = min(arch.max_length or 40, 40)
    rows = random_rows(arch, [S] * 4, S, seed=seed)
    tokens = rows.tokens(arch)

    @partial(jax.jit, compiler_options=QUICK)
    def sharpness(params):
        out = model.apply({"params": params}, tokens, capture=("attentions",))
        # Of tokens that see more than a few others: those are sharp by themselves.
        return out["attentions"][..., S // 2 :, :].max((2, 3, 4)).min(1)  # [N]

    copies = np.asarray(arch.copies("attention"))
    for _ in range(100):
        dull = np.asarray(sharpness(unflatten_like(params, flat))) <= SHARP
        if not dull.any():
            return unflatten_like(params, flat)
        for name in ("q", "k"):
            kernel = flat[f"stack/layers/attention/{name}/kernel"]
            kernel[np.unique(copies[dull])] *= 1.1
    raise AssertionError("attention does not become sharp")


def unflatten_like(tree: dict, flat: dict[str, np.ndarray]) -> dict:
    return jax.tree.unflatten(jax.tree.structure(tree), list(flat.values()))


@lru_cache
def our_function(arch: Arch, heads: tuple[str, ...], dtype=jnp.float32):
    """(params, tokens, labels) -> outputs and the gradient of the sum of losses, in one
    jitted function."""
    model = Model(arch, dtype=dtype)
    # Captured attention would be the dense definition: the window's kernel is measured.
    dense = ("attentions",) if arch.attention == "dense" else ()
    capture = ("hidden", *dense)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params, tokens, labels):
        def total(params):
            starts = labels["span"][:, :1]
            out = model.apply(
                {"params": params}, tokens, starts=starts, heads=heads, capture=capture
            )
            losses = {head: loss_of(head, arch, out, tokens, labels) for head in heads}
            return sum(losses.values()), out | {"loss": losses}

        with jax.default_matmul_precision("highest"):
            (_, out), gradients = jax.value_and_grad(total, has_aux=True)(params)
        return {"outputs": out, "gradients": gradients}

    return compute


def our_results(
    arch: Arch, params: dict, rows: Rows, heads: tuple[str, ...], *, dtype=jnp.float32
) -> dict:
    compute = our_function(arch, heads, dtype)
    return jax.device_get(compute(params, rows.tokens(arch), rows.labels))


def loss_of(head: str, arch: Arch, out: dict, tokens: Tokens, labels: dict):
    """A head's loss as the reference classes define it."""
    if head == "pooler":
        return jnp.zeros(())
    answers, span = jnp.asarray(labels[head]), jnp.asarray(labels["span"])
    if head == "rtd":
        return binary(out["rtd"], answers, tokens.group > 0)
    if head == "answer":
        ends = (out["answer_start"], out["answer_end"][..., 0])
        ends = sum(cross_entropy(ends[n], span[:, n]) for n in (0, 1)) / 2
        everywhere = jnp.ones_like(answers, bool)
        return ends + 0.5 * binary(out["answer_class"], answers, everywhere)
    logits = out[head]
    if head in ON_POOLED:
        logits = logits[:, 0]
    if head == "choice":
        logits = logits.reshape(-1, 2)
    if head == "span":
        logits = jnp.where(tokens.group[:, :, None] > 0, logits, -jnp.inf)
        logits = logits.swapaxes(1, 2)  # [B, 2, S]
    if head == "lm" and arch.order == "causal":
        logits, answers = logits[:, :-1], answers[:, 1:]
    return cross_entropy(logits, answers)


def cross_entropy(logits, answers):
    """The mean over answers that are asked for."""
    asked = answers >= 0
    chosen = jnp.maximum(answers, 0)[..., None]
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1)[..., 0]
    return jnp.where(asked, each, 0.0).sum() / asked.sum()


def binary(scores, answers, asked):
    """The mean of -log σ(±score) over what is asked for."""
    each = jnp.logaddexp(0.0, scores) - scores * answers
    return (each * asked).sum() / asked.sum()


# Theirs.


def their_model(
    arch: Arch, layout: Layout, heads: tuple[str, ...], tensors: dict[str, np.ndarray]
):
    """Their class with these tensors; an error if it lacks or does not know one."""
    import torch
    import transformers

    name = layout.classes[heads]
    pad_id = max(0, arch.position_offset - 1)
    config = config_of(arch, layout, heads, pad_id=pad_id)
    kind = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    # A pooler that is not among the heads is left out, where the class can.
    bare = heads == () and ("pooler",) in layout.classes
    options = {"add_pooling_layer": False} if bare else {}
    cls = getattr(transformers, name)
    model = cls._from_config(kind, attn_implementation="eager", **options).eval()
    # The bare class has the names without the body's prefix.
    there = model.state_dict()
    cut = {n: n.removeprefix(layout.prefix) for n in tensors}
    given = {
        (n if n in there else cut[n]): torch.tensor(tensor)
        for n, tensor in tensors.items()
    }
    report = model.load_state_dict(given, strict=False)
    tied = set(layout.repeats(arch, heads))
    lost = [
        n
        for n in report.missing_keys
        if n not in tied and not layout.is_ignored(n) and layout.prefix + n not in tied
    ]
    if lost or report.unexpected_keys:
        raise InputError(
            f"{name} has {lost} which the table does not name, or does not know "
            f"{report.unexpected_keys}"
        )
    model.tie_weights()
    return model


def their_outputs(
    model, arch: Arch, heads: tuple[str, ...], rows: Rows, *, labelled: bool = True
) -> tuple[dict, object]:
    """The outputs under our names, and the loss (None without labels)."""
    import torch

    def tensor(array: np.ndarray):
        array = torch.tensor(np.asarray(array, np.int64))
        return array.reshape(-1, 2, array.shape[-1]) if "choice" in heads else array

    inputs = {"input_ids": tensor(rows.ids), "attention_mask": tensor(rows.real)}
    if arch.types > 1:
        inputs["token_type_ids"] = tensor(rows.types)
    if arch.task_types:
        inputs["task_type_ids"] = torch.tensor(rows.task).long()  # not put together
    if arch.attention == "window":
        inputs["global_attention_mask"] = tensor(rows.reach)
    both = len(set(heads) - {"pooler"}) > 1
    if "choice" in heads and arch.order == "causal":  # the class with two heads
        last = np.where(rows.real, np.arange(rows.real.shape[1]), 0).max(1)
        inputs["mc_token_ids"] = torch.tensor(last).reshape(-1, 2)
        flat = inputs["attention_mask"].flatten(0, 1)  # GPT does not do it
        inputs["attention_mask"] = flat
    for head in heads if labelled else ():
        answer = torch.tensor(np.asarray(rows.labels.get(head, 0), np.int64))
        if head == "lm" and "choice" in heads:
            inputs["labels"] = answer.reshape(-1, 2, answer.shape[-1])
        elif head == "answer":
            inputs |= answer_inputs(rows)
        elif head not in ("pooler", "span"):
            field = {"nsp": "next_sentence_label", "sop": "sentence_order_label"}
            field |= {"choice": "mc_labels"}
            inputs[field.get(head, "labels") if both else "labels"] = answer
    out = model(**inputs, output_hidden_states=True, output_attentions=True)
    B, S = rows.ids.shape
    states = [state.reshape(B, S, -1) for state in out.hidden_states]
    found = {"hidden": torch.stack(states)}
    if arch.attention == "dense":
        found["attentions"] = torch.stack(out.attentions)
    logits = getattr(out, "logits", None)
    for head in heads:
        if head == "pooler":
            found[head] = getattr(out, "pooler_output", None)
        elif head == "span":
            found[head] = torch.stack([out.start_logits, out.end_logits], -1)
        else:
            field = {"lm": "prediction_logits", "nsp": "seq_relationship_logits"}
            field |= {"sop": "sop_logits", "choice": "mc_logits"}
            found[head] = getattr(out, field.get(head, ""), logits)
    found.pop("answer", None)  # its class gives the loss only
    found = {name: value for name, value in found.items() if value is not None}
    if "choice" in found:
        found["choice"] = found["choice"].reshape(-1, 1)
    if "lm" in found:
        found["lm"] = found["lm"].reshape(B, S, -1)
    loss = getattr(out, "loss", None)
    if labelled and "mc_loss" in out:
        loss = loss + out.mc_loss
    if labelled and heads == ("span",):
        # Theirs lets padding take part in the softmax; ours does not.
        real = torch.tensor(rows.real)[:, :, None]
        scores = found["span"].masked_fill(~real, -torch.inf)
        answer = torch.tensor(rows.labels["span"]).long()
        loss = torch.nn.functional.cross_entropy(scores, answer)
    arrays = {name: value.detach().numpy() for name, value in found.items()}
    return arrays, loss


def answer_inputs(rows: Rows) -> dict:
    """What XLNet's class for questions wants to know to give a loss."""
    import torch

    start, end = torch.tensor(rows.labels["span"]).long().T
    last = np.where(rows.real, np.arange(rows.real.shape[1]), 0).max(1)
    return {
        "start_positions": start,
        "end_positions": end,
        "cls_index": torch.tensor(last),
        "is_impossible": torch.tensor(rows.labels["answer"]).float(),
        "p_mask": torch.tensor(~rows.real).float(),
    }


def their_results(arch: Arch, layout: Layout, params: dict, rows: Rows) -> dict:
    """Outputs of all classes of a layout, each head's from the class that is made for
    it, and the gradient of the sum of their losses, as our flat tree."""
    outputs, gradients, losses = {}, {}, 0.0
    round_trip = True
    flat = flatten(params)
    for heads in classes_for(arch, layout, rows):
        mine = {
            name: leaf
            for name, leaf in params.items()
            if name not in HEADS or name in heads
        }
        tensors, extra = to_theirs(mine, arch, layout, heads=heads)
        if extra:
            raise InputError(f"no name in the {layout.model_type} table: {[*extra]}")
        model = their_model(arch, layout, heads, tensors)
        if arch.attention == "dense":
            # In double precision: what differs is our rounding alone. Theirs is as
            # large, and another one on another processor. (Longformer hides by the
            # smallest number of its type: in double its gradients are infinite.)
            model = model.double()
        found, loss = their_outputs(model, arch, heads, rows)
        outputs |= found
        state = {name: value.numpy() for name, value in model.state_dict().items()}
        back = flatten(
            to_ours(
                state,
                arch,
                layout,
                source="the reference",
                architectures=(layout.classes[heads],),
            )
        )
        round_trip &= all(np.array_equal(back[n], flat[n]) for n in back)
        round_trip &= back.keys() == flatten(mine).keys()
        if loss is None:
            continue
        losses += float(loss.detach())
        loss.backward()
        repeats = layout.repeats(arch, heads)
        its = {}
        for given, parameter in model.named_parameters():
            name = repeats.get(given, given)  # whichever of the two comes first
            its[name if name in tensors else layout.prefix + name] = parameter.grad
        for name, leaf in gradients_of(its, arch, layout, heads, flat).items():
            gradients[name] = gradients.get(name, 0) + leaf
    return {
        "outputs": outputs | {"loss": losses},
        "gradients": gradients,
        "round_trip": round_trip,
    }


def classes_for(arch: Arch, layout: Layout, rows: Rows) -> list[tuple[str, ...]]:
    """Classes that have every head once, besides the pooler."""
    chosen: list[tuple[str, ...]] = []
    covered = {"pooler"}
    for heads in sorted(layout.classes, key=len, reverse=True):
        if not rows.pooled(arch) and {*ON_POOLED, "pooler", "answer"} & set(heads):
            continue
        new = set(heads) - {"pooler"}
        if heads == ("pooler",) or (new and not new & covered):
            chosen.append(heads)
            covered |= new
    return chosen


def gradients_of(theirs: dict, arch: Arch, layout: Layout, heads, flat: dict) -> dict:
    """Their gradients, by their names, as our flat tree; None is zero."""
    ours = {}
    for row in layout.table(arch, heads).values():
        if not all(path in flat for path in paths(row)):
            continue
        blank = {path: np.zeros(flat[path].shape, np.float32) for path in paths(row)}
        tensors = put_out(row, blank, arch)
        for name in tensors:
            if theirs.get(name) is not None:
                tensors[name] = theirs[name].numpy()
        shapes = [flat[path].shape for path in paths(row)]
        ours |= take_in(row, list(tensors.values()), arch, shapes)
    return ours


# The comparison.


def excess(ours, theirs, *, relative: float, floor: float, absolute: float) -> float:
    """How many times the allowed difference there is; above 1 is a failure."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    allowed = relative * max(floor, np.abs(theirs).max()) + absolute
    difference = np.abs(ours - theirs).max() / allowed
    return float("inf") if np.isnan(difference) else float(difference)


def compare(arch: Arch, ours: dict, theirs: dict, rows: Rows) -> dict[str, tuple]:
    """Every output at real positions and every gradient: name -> (largest difference,
    how many times the allowed one that is)."""
    pairs = outputs_compared(ours["outputs"], theirs["outputs"], rows)
    loss = sum(ours["outputs"]["loss"].values())
    pairs["loss"] = (loss, theirs["outputs"]["loss"])
    found = {name: measured(*pair, OUTPUT) for name, pair in pairs.items()}
    mine = flatten(ours["gradients"])
    for name, leaf in theirs["gradients"].items():
        found[f"gradient {name}"] = measured(mine[name], leaf, GRADIENT)
    return found


def measured(ours, theirs, limits: dict) -> tuple[float, float]:
    """The largest difference, and how many times the allowed one that is."""
    difference = np.abs(np.asarray(ours) - theirs).max()
    return float(difference), excess(ours, theirs, **limits)


def outputs_compared(ours: dict, theirs: dict, rows: Rows) -> dict[str, tuple]:
    """Pairs of what must be equal: every output, at real positions."""
    real, pairs = rows.real, {}
    for n, (a, b) in enumerate(zip(ours["hidden"], theirs["hidden"], strict=True)):
        pairs[f"hidden {n}"] = (a[real], b[real])
    if "attentions" in theirs and "attentions" in ours:
        both = zip(ours["attentions"], theirs["attentions"], strict=True)
        for n, (a, b) in enumerate(both):  # [B, S_q, H, S_k]
            pairs[f"attentions {n}"] = (a.swapaxes(1, 2)[real], b.swapaxes(1, 2)[real])
    for head in HEADS:
        if head not in theirs:
            continue
        a, b = ours[head], theirs[head]
        if head in (*ON_POOLED, "pooler"):
            pairs[f"logits {head}"] = (a[:, 0], b)
        else:
            a = a[..., : b.shape[-1]] if head == "lm" else a
            pairs[f"logits {head}"] = (a[real], b[real])
    return pairs


def verify(directory: Path, params: dict, arch: Arch, layout: Layout) -> float:
    """max |ours - theirs| over all outputs at real positions, of what is on disk."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    heads = class_for(layout, params, arch)
    bare = heads == () and ("pooler",) in layout.classes
    options = {"add_pooling_layer": False} if bare else {}
    model, report = getattr(transformers, layout.classes[heads]).from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True, **options
    )
    lost = [*report["missing_keys"], *report["unexpected_keys"]]
    if lost:
        raise InputError(f"transformers did not match: {', '.join(sorted(lost))}")
    S = min(32, arch.max_length or 32)
    side = "left" if arch.pool_from == "last" else "right"
    rows = random_rows(arch, [S, S // 2, S - 1, min(3, S)], S, side=side)
    with torch.no_grad():
        theirs, _ = their_outputs(model.eval(), arch, heads, rows, labelled=False)
    with jax.default_matmul_precision("highest"):
        ours = Model(arch).apply(
            {"params": params}, rows.tokens(arch), heads=heads, capture=("hidden",)
        )
    last = {"hidden": theirs["hidden"][-1:]}
    found = outputs_compared(
        ours | {"hidden": ours["hidden"][-1:]}, theirs | last, rows
    )
    # np.max, unlike max, gives NaN if any difference is NaN.
    return float(np.max([np.abs(a - b).max() for a, b in found.values()]))


# The table of `bert_jax presets --check`.


@dataclasses.dataclass(frozen=True)
class Parity:
    """What was measured of a member, at tiny size with its choices."""

    member: str
    also: int  # presets that differ from it in sizes only
    parameters: int  # of its reference class, at its real size
    reference: str
    hidden: float | None = None  # largest differences; None: there is no class
    logits: float | None = None
    gradients: float | None = None
    share: float | None = None  # of the allowed difference, the largest of all
    round_trip: str = ""  # exact | lossy


def kinds_of(members: list[Preset]) -> Iterator[tuple[Parity, Preset]]:
    """A row, not measured yet, for all members that compute the same function, and the
    first of them."""
    kinds: dict[tuple, list[Preset]] = {}
    for member in members:
        kinds.setdefault((member.layout, tiny(member.arch)), []).append(member)
    for first, *others in kinds.values():
        heads = reference_heads(first.layout, first.reference)
        count = count_params(first.arch, heads=heads)
        yield Parity(first.name, len(others), count, first.reference), first


def check_members(members: list[Preset]) -> Iterator[Parity]:
    """Measures every member; those that compute the same function, once."""
    for row, first in kinds_of(members):
        layout = LAYOUTS[first.layout]
        if layout.verified_by != "transformers":
            yield row
            continue
        sides = [measure(tiny(first.arch), layout, side=side) for side in SIDES]
        found = [item for differences, _ in sides for item in differences.items()]

        def worst(kind: str, found=found) -> float:
            return max(size for name, (size, _) in found if name.startswith(kind))

        yield dataclasses.replace(
            row,
            hidden=worst("hidden"),
            logits=worst("logits"),
            gradients=worst("gradient"),
            share=max(share for _, (_, share) in found),
            round_trip="exact" if all(exact for _, exact in sides) else "lossy",
        )


def measure(arch: Arch, layout: Layout, *, side: str) -> tuple[dict[str, tuple], bool]:
    """All differences with padding on that side, and whether names go both ways."""
    rows = random_rows(arch, [24, 17, 9, 24], 24, side=side)
    classes = classes_for(arch, layout, rows)
    heads = tuple(head for head in HEADS if any(head in c for c in classes))
    params = sharp_params(arch, heads=heads)
    theirs = their_results(arch, layout, params, rows)
    ours = our_results(arch, params, rows, heads)
    return compare(arch, ours, theirs, rows), theirs["round_trip"]
