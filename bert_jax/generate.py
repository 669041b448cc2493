"""Go on with a text, one piece after the other.

A causal member (GPT, GPT-2, Transformer-XL) is asked what follows the last piece of a
text that begins as the rows did which it learned from: with [CLS], or bare (stream). A
prefix member (UniLM) reads [CLS] text [SEP] as a whole and writes another text: it is
asked at a [MASK] behind what it has written, whose place the piece then takes.

    x_t ~ softmax(top_p(top_k(logits_t / temperature))), or greedy: their argmax

(Radford et al. 2019; top_k: Fan et al. 2018, arXiv:1805.04833; top_p: Holtzman et al.
2020, arXiv:1904.09751; UniLM: Dong et al. 2019, arXiv:1905.03197.) No token is read
twice: a `Memory` keeps its keys and values. It has a slot for each token that will be
read, filled from the right: what is new pushes the oldest slot out on the left. So
shapes are static, distances along the row are those of the text, and slots that are not
filled yet are padding, which nothing sees. Differs from UniLM's release in: no beams;
and a UniLM that was only pretrained never predicted a [SEP], so it does not stop.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import InputError
from bert_jax.model_dir import LoadedModel
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import Memory, Tokens, after, counted, plain
from bert_jax.objectives import unilm
from bert_jax.presets import PRESETS, Preset

SEQ2SEQ = unilm.TYPES[unilm.FORMS.index("seq2seq")]  # of a text, of the one written
NOTHING = -1  # stands behind the end of a text that is shorter than others


# What is drawn.


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a piece is drawn from the logits; first the temperature, then the cuts."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def cut(self, logits: jax.Array) -> jax.Array:
        """The logits [B, V] of what is drawn from; what is cut off has -inf."""
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = most_probable(logits, self.top_k)
        if self.top_p is not None:
            logits = nucleus(logits, self.top_p)
        return logits


def most_probable(logits: jax.Array, count: int) -> jax.Array:
    """The `count` largest, and what equals the least of them."""
    least = jax.lax.top_k(logits, count)[0][..., -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)


def nucleus(logits: jax.Array, share: float) -> jax.Array:
    """As few of the largest as have that share of the probability together, and what
    equals the least of them."""
    falling = jnp.sort(logits, descending=True)
    probability = jax.nn.softmax(falling)
    larger = jnp.cumsum(probability, axis=-1) - probability  # of all that are larger
    least = jnp.where(larger < share, falling, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def draw(
    logits: jax.Array, keys: jax.Array, sampling: Sampling | None = None
) -> jax.Array:
    """A piece for each row [B] of logits [B, V], by its own key; None is greedy."""
    if sampling is None:
        return logits.argmax(-1)
    return jax.vmap(jax.random.categorical)(keys, sampling.cut(logits))


# What is read.


@dataclasses.dataclass(frozen=True)
class Form:
    """How a member is asked."""

    order: str  # causal | prefix
    types: tuple[int, int] = (0, 0)  # of the text that is given, and of the new one
    blanks: tuple[int, ...] = ()  # what stands at the place that is asked for

    def given(self, prompts: Sequence[Sequence[int]], *, length: int) -> Tokens:
        """Rows of `length` with padding on the left, then what is asked for first."""
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        ids = np.array([[0] * (length - len(p)) + [*p] for p in prompts], np.int32)
        real = np.arange(length) >= length - lengths[:, None]
        prompt = plain(
            ids,
            types=np.full_like(ids, self.types[0]),
            real=real,
            order=self.order,
            prefix=lengths,
            positions=counted(real),
        )
        asked = self.written(ids[:, :0], start=lengths, prefix=lengths)
        return jax.tree.map(after, prompt, asked)

    def written(self, ids, *, start: jax.Array, prefix: jax.Array) -> Tokens:
        """New pieces [B, n] from position `start` [B] on, then what is asked for."""
        blanks = jnp.broadcast_to(
            jnp.array(self.blanks, jnp.int32), (len(ids), len(self.blanks))
        )
        ids = after(ids, blanks)
        return plain(
            ids,
            types=jnp.full_like(ids, self.types[1]),
            order=self.order,
            prefix=prefix,
            positions=start[:, None] + jnp.arange(ids.shape[1]),
        )


CAUSAL = Form("causal")


def unfilled(arch: Arch, *, rows: int, slots: int) -> Memory:
    """A memory of nothing."""
    blank = jnp.zeros((rows, slots), jnp.int32)
    shape = (arch.layers, rows, slots, arch.heads, arch.head_size)
    tokens = Tokens(*[blank] * 5)
    return Memory(tokens, k=jnp.zeros(shape), v=jnp.zeros(shape))


def read(
    model: Model, params: dict, memory: Memory, tokens: Tokens, *, blanks: int = 0
) -> tuple[jax.Array, Memory]:
    """The logits at the last token, [B, V], and the memory with the tokens in it, all
    but the last `blanks`."""
    (B, Q), M = tokens.ids.shape, memory.tokens.ids.shape[1]
    out = model.apply(
        {"params": params},
        tokens,
        memory=memory,
        where=jnp.full((B, 1), Q - 1),
        heads=("lm",),
        capture=("k", "v"),
    )
    kept = slice(Q - blanks, Q - blanks + M)
    tokens = jax.tree.map(
        lambda old, new: after(old, new)[:, kept], memory.tokens, tokens
    )
    k, v = (out[name][:, :, kept] for name in "kv")
    return out["lm"][:, 0], Memory(tokens, k=k, v=v)


# The loop.


@lru_cache
def writer(arch: Arch, form: Form, sampling: Sampling | None, length: int):
    """(params, tokens, prefix [B], keys [B], allowed [V], stop) -> the pieces [B,
    length], NOTHING behind `stop`, and the log-probability of each row by the bare
    model."""
    model, blanks = Model(arch), len(form.blanks)

    @jax.jit
    def write(params, tokens, prefix, keys, allowed, stop):
        def choose(logits, t):
            now = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
            open_to = jnp.where(allowed, logits, -jnp.inf)
            piece = draw(open_to, now, sampling)[:, None]
            score = jnp.take_along_axis(jax.nn.log_softmax(logits), piece, axis=-1)
            return piece[:, 0].astype(jnp.int32), score[:, 0]

        def ended(pieces, t):
            last = pieces[:, t - 1]
            return (last == stop) | (last == NOTHING)

        def goes_on(state):
            t, pieces, _, _ = state
            return (t < length) & ~ended(pieces, t).all()

        def step(state):
            t, pieces, score, memory = state
            over, last = ended(pieces, t), pieces[:, t - 1]
            tokens = form.written(last[:, None], start=prefix + t - 1, prefix=prefix)
            logits, memory = read(model, params, memory, tokens, blanks=blanks)
            piece, gained = choose(logits, t)
            pieces = pieces.at[:, t].set(jnp.where(over, NOTHING, piece))
            return t + 1, pieces, score + jnp.where(over, 0, gained), memory

        B, S = tokens.ids.shape
        memory = unfilled(arch, rows=B, slots=S - blanks + length - 1)
        logits, memory = read(model, params, memory, tokens, blanks=blanks)
        piece, score = choose(logits, 0)
        pieces = jnp.full((B, length), NOTHING).at[:, 0].set(piece)
        _, pieces, score, _ = jax.lax.while_loop(
            goes_on, step, (1, pieces, score, memory)
        )
        return pieces, score

    return write


def go_on(
    arch: Arch,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    form: Form = CAUSAL,
    sampling: Sampling | None = None,
    stop: int = NOTHING,
    allowed: np.ndarray | None = None,  # bool [V]; None: any piece
    keys: jax.Array | None = None,  # [B]: what is drawn for each
) -> tuple[np.ndarray, np.ndarray]:
    """What `writer` makes of prompts, given as ids."""
    if allowed is None:
        allowed = np.ones(arch.padded_vocab, bool)
    if keys is None:
        keys = jax.random.split(jax.random.key(0), len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    # Rows as long as a power of two: few lengths, few compilations.
    tokens = form.given(prompts, length=1 << int(lengths.max() - 1).bit_length())
    write = writer(arch, form, sampling, length)
    return jax.device_get(write(params, tokens, lengths, keys, allowed, stop))


# Texts.


def generate(
    model: LoadedModel,
    texts: str | Sequence[str],
    *,
    length: int = 40,
    count: int = 1,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> list[dict]:
    """`count` texts of at most `length` pieces for each of `texts`, one after another.

    Greedy, unless a temperature, top_k or top_p is given. Each is a dict: prompt, text
    (of a causal member what follows the prompt), ids, ended (it came to its end before
    `length`), log_probability (of the ids and the end by the model, at temperature 1,
    nothing cut off). What is drawn depends on the seed and the numbers of text and
    sample alone.
    """
    form, tokenizer = form_of(model), model.tokenizer
    sampling = None
    if (temperature, top_k, top_p) != (None, None, None):
        warmth = 1.0 if temperature is None else temperature
        sampling = Sampling(warmth, top_k, top_p)
    texts = [texts] if isinstance(texts, str) else [*texts]
    prompts = [tokenizer.encode(text) for text in texts]
    problems = check_settings(sampling, length, count, seed, pieces=tokenizer.size)
    first, last = around(model, form)
    more = len(first) + len(last) + len(form.blanks)
    problems += check_prompts(prompts, texts, length, more, model.arch.max_length)
    if problems:
        raise InputError("\n".join(problems))
    # What no text has: special pieces but the end, and rows of the table without one.
    stop = NOTHING if tokenizer.sep_id is None else tokenizer.sep_id
    allowed = np.arange(model.arch.padded_vocab) < tokenizer.size
    allowed[[i for i in tokenizer.special_ids if i != stop]] = False
    rows = [(n, sample) for n in range(len(texts)) for sample in range(count)]
    key, fold = jax.random.key(seed), jax.random.fold_in
    pieces, scores = go_on(
        model.arch,
        model.params,
        [[*first, *prompts[n], *last] for n, _ in rows],
        length=length,
        form=form,
        sampling=sampling,
        stop=stop,
        allowed=allowed,
        keys=jax.vmap(lambda row: fold(fold(key, row[0]), row[1]))(np.array(rows)),
    )
    found = []
    for (n, _), row, score in zip(rows, pieces, scores, strict=True):
        ids = row[(row != stop) & (row != NOTHING)].tolist()
        text = text_of(tokenizer, prompts[n], ids, form)
        told = {"prompt": texts[n], "text": text, "ids": ids}
        told |= {"ended": len(ids) < length, "log_probability": float(score)}
        found.append(told)
    return found


def text_of(tokenizer, prompt: list[int], ids: list[int], form: Form) -> str:
    """The text of new pieces: behind the prompt as it stands there, space or none."""
    if form.order == "causal":
        before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
        if whole.startswith(before):
            return whole[len(before) :]
    return tokenizer.decode(ids)


def order_of(member: Preset) -> str | None:
    """How a member writes by what it was trained for, or None."""
    if member.objective == "unilm":
        return "prefix" if member.hyper.get("seq2seq", 1.0) > 0 else None
    return "causal" if member.objective == "causal_lm" else None


def form_of(model: LoadedModel) -> Form:
    """How the model is asked, or why it cannot write."""
    path, order = model.path, order_of(model.preset)
    if order is None:
        able = ", ".join(name for name in PRESETS if order_of(PRESETS[name]))
        raise InputError(
            f"{path} is a {model.preset.layout} that learned to read texts from both "
            f"sides, not to write them. Members that can: {able}"
        )
    if model.preset.hyper.get("direction") == "backward":
        raise InputError(f"{path} was trained from right to left: it cannot go on")
    if "lm" not in model.heads:
        raise InputError(f"{path} has no language-model head: it cannot write")
    if order == "causal":
        return CAUSAL
    tokenizer = model.tokenizer
    needed = {"[CLS]": tokenizer.cls_id, "[SEP]": tokenizer.sep_id}
    needed["[MASK]"] = tokenizer.mask_id
    missing = [name for name, found in needed.items() if found is None]
    if missing:
        raise InputError(f"the tokenizer of {path} has no {' and no '.join(missing)}")
    return Form("prefix", SEQ2SEQ, (tokenizer.mask_id,))


def around(model: LoadedModel, form: Form) -> tuple[list[int], list[int]]:
    """The special pieces that the model reads before and after a text."""
    if form.order == "causal" and model.preset.rows == "stream":
        return [], []
    wrapped, _ = model.tokenizer.wrap([NOTHING])
    text = wrapped.index(NOTHING)
    return wrapped[:text], wrapped[text + 1 :] if form.order == "prefix" else []


def check_settings(
    sampling: Sampling | None, length: int, count: int, seed: int, *, pieces: int
) -> list[str]:
    """What is wrong with the settings."""
    problems = [
        f"{name}={value} must be at least 1"
        for name, value in (("length", length), ("count", count))
        if value < 1
    ]
    if not 0 <= seed < 2**32:
        problems.append(f"seed={seed} must be in 0..{2**32 - 1}")
    if sampling is None:
        if count > 1:
            problems.append(
                f"count={count}: without temperature, top_k or top_p the most probable "
                "piece is taken, and all texts would be the same"
            )
        return problems
    warmth, top_k, top_p = dataclasses.astuple(sampling)
    if not 0 < warmth < math.inf:
        problems.append(
            f"temperature={warmth} must be more than 0; leave it out for greedy"
        )
    if top_k is not None and not 1 <= top_k <= pieces:
        problems.append(f"top_k={top_k} must be in 1..{pieces}")
    if top_p is not None and not 0 < top_p <= 1:
        problems.append(f"top_p={top_p} must be more than 0 and at most 1")
    return problems


def check_prompts(
    prompts: list[list[int]], texts: list[str], length: int, more: int, room
) -> list[str]:
    """What is wrong with the prompts, which so many `more` special pieces are read
    with; `room` is how many positions there are."""
    if not prompts:
        return ["no text is given"]
    problems = [
        f"the text {text!r} is empty: there is nothing to go on from"
        for text, prompt in zip(texts, prompts, strict=True)
        if not prompt
    ]
    if room is not None and max(map(len, prompts)) + more + length - 1 > room:
        problems.append(
            f"a text of {max(map(len, prompts))} pieces and length={length} more are "
            f"too many: the model has positions for {room}"
        )
    return problems
