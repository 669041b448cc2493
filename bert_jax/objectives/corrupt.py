"""Corruptions: which tokens are predicted, and what the model sees in their place.

    choose        any tokens (BERT)
    choose_words  words, or runs of words whose number is drawn: whole words (BERT-wwm,
                  Cui et al. 2021, arXiv:1906.08101), n-grams (ALBERT, Lan et al. 2020;
                  MacBERT, Cui et al. 2020), spans (SpanBERT, Joshi et al. 2020)
    replace       a chosen piece is hidden, made random or kept, each by itself or, as
                  in SpanBERT, all of a run alike
    replace_by_similar
                  a chosen word becomes a similar one, random, or is kept (MacBERT)

Everything here is for one row [S] and is used under `vmap`, so that what a row draws
is a function of its own key alone. Shapes are static; choices are made by sorting
noise, because a scatter or `top_k` over the batch would make the devices talk.
"""

import jax
import jax.numpy as jnp
import numpy as np


def wrong_shares(objective, *, weights: tuple[str, ...]) -> list[str]:
    """What is no share among rate, hide and randomise, and no weight among these."""
    found = {name: getattr(objective, name) for name in ("rate", "hide", "randomise")}
    problems = [
        f"objective.{name}={value} must be between 0 and 1"
        for name, value in found.items()
        if not 0 <= value <= 1
    ]
    if found["rate"] == 0:
        problems.append("objective.rate=0 predicts nothing")
    if found["hide"] + found["randomise"] > 1:
        problems.append(
            f"objective.hide={found['hide']} and objective.randomise="
            f"{found['randomise']} add up to more than 1"
        )
    for name in weights:
        if getattr(objective, name) < 0:
            problems.append(f"objective.{name}={getattr(objective, name)} is negative")
    return problems


def budget(length: int, rate: float) -> np.ndarray:
    """Predictions for a row of n real tokens, n = 0..length, as BERT counts them.

    max(1, round(rate * n)), rounded half to even, [CLS] and [SEP] included in n.
    """
    counts = [max(1, round(rate * n)) for n in range(length + 1)]
    return np.asarray([0, *counts[1:]], np.int32)


def choose(key: jax.Array, candidates: jax.Array, count: jax.Array) -> jax.Array:
    """Exactly min(count, candidates) of the candidates [S], uniformly: bool [S]."""
    noise = jnp.where(candidates, jax.random.uniform(key, candidates.shape), jnp.inf)
    place = jnp.argsort(jnp.argsort(noise))
    return candidates & (place < count)


def truncated_geometric(p: float, most: int) -> tuple[float, ...]:
    """p (1-p)^(n-1) for n = 1..most, made to sum to 1: not the pmf of min(n, most)."""
    pmf = [p * (1 - p) ** n for n in range(most)]
    return tuple(x / sum(pmf) for x in pmf)


# How probable it is that 1, 2, ... words are chosen together.
LENGTHS = {
    "word": (1.0,),
    "ngram": tuple(1 / n / (1 + 1 / 2 + 1 / 3) for n in (1, 2, 3)),  # ALBERT
    "macbert": (0.4, 0.3, 0.2, 0.1),
    "span": truncated_geometric(0.2, 10),  # SpanBERT: 3.8 words on average
}


def choose_words(
    key: jax.Array,
    candidates: jax.Array,  # bool [S]
    words: jax.Array,  # [S], equal for the pieces of a word
    count: jax.Array,
    *,
    lengths: tuple[float, ...],
    merge: bool = False,
) -> jax.Array:
    """At most `count` of the candidates, in runs of whole words: bool [S].

    Anchors come in random order. From an anchor's word on, as many words are taken as
    were drawn for it, or as many of these as the budget allows and as follow one
    another without anything else between them. An anchor whose word is taken is passed
    over, and so is a run that meets a taken word; with `merge` it goes on through it,
    and anchors are pieces instead of words (SpanBERT).
    """
    S = candidates.shape[0]
    before = jnp.where(candidates, words, -1)
    begins = candidates & (words != jnp.pad(before, (1, 0), constant_values=-1)[:S])
    number = jnp.cumsum(begins) - 1  # of the word, for each of its pieces
    # By word: how many pieces it has, and which text it lies in.
    place = jnp.sort(jnp.where(begins, jnp.arange(S), S))
    earlier = jnp.where(place < S, jnp.cumsum(candidates)[place] - 1, candidates.sum())
    size = jnp.diff(earlier, append=candidates.sum())
    text = jnp.cumsum(~candidates)[place]

    order_key, length_key = jax.random.split(key)
    anchors = candidates if merge else begins
    noise = jnp.where(anchors, jax.random.uniform(order_key, (S,)), jnp.inf)
    order = jnp.argsort(noise)
    drawn = 1 + jax.random.choice(length_key, len(lengths), (S,), p=jnp.array(lengths))
    word = jnp.arange(S)

    def take(taken: jax.Array, anchor) -> tuple[jax.Array, None]:
        start, wanted, is_anchor = anchor
        same_text = text == jnp.sum(jnp.where(word == start, text, 0))
        run = (word >= start) & (word < start + wanted) & same_text & (size > 0)
        added = jnp.cumsum(jnp.where(run & ~taken, size, 0))
        run &= added <= count - jnp.sum(jnp.where(taken, size, 0))
        met = taken & (word == start if merge else run)
        return taken | (run & is_anchor & ~met.any()), None

    asked = (number[order], drawn, anchors[order])
    taken, _ = jax.lax.scan(take, jnp.zeros(S, bool), asked)
    return candidates & taken[jnp.maximum(number, 0)]


def edges_of_words(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which tokens of [..., S] begin a word, and which end one; word 0 is none."""
    other = words[..., 1:] != words[..., :-1]
    edge = jnp.ones_like(words[..., :1], bool)
    begins, ends = (jnp.concatenate(x, -1) for x in ([edge, other], [other, edge]))
    return begins & (words > 0), ends & (words > 0)


def runs_of(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each chosen place of [S] the first and the last place of its run."""
    S, index = chosen.shape[0], jnp.arange(chosen.shape[0])
    left, right = jnp.pad(chosen, (1, 0))[:S], jnp.pad(chosen, (0, 1))[1:]
    first = jax.lax.cummax(jnp.where(chosen & ~left, index, 0))
    ends = jnp.where(chosen & ~right, index, S - 1)
    return first, jax.lax.cummin(ends, reverse=True)


def borders_of(chosen: jax.Array) -> jax.Array:
    """For each chosen place of [S]: what stands before and after its run, and its place
    in the run, from 0: [S, 3]."""
    first, last = runs_of(chosen)
    return jnp.stack([first - 1, last + 1, jnp.arange(len(chosen)) - first], -1)


def positions_of(chosen: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """The chosen positions in order, filled up with 0: where [P] and weights [P]."""
    S = chosen.shape[0]
    index = jnp.arange(S, dtype=jnp.int32)
    where = jnp.sort(jnp.where(chosen, index, S))[:slots]
    filled = where < S
    return jnp.where(filled, where, 0), filled.astype(jnp.float32)


def replace(
    key: jax.Array,
    ids: jax.Array,
    chosen: jax.Array,
    *,
    mask_id: int,
    vocab_size: int,
    hide: float,
    randomise: float,
    by_run: bool = False,
) -> jax.Array:
    """Each chosen piece is hidden, made random, or kept, independently; or each run of
    them, whose random pieces still differ.

    The random piece is uniform over the whole vocabulary, as in BERT's release: it
    may be a special piece or the original.
    """
    draw_key, piece_key = jax.random.split(key)
    draw = jax.random.uniform(draw_key, ids.shape)
    if by_run:
        draw = draw[runs_of(chosen)[0]]
    random = jax.random.randint(piece_key, ids.shape, 0, vocab_size, ids.dtype)
    new = jnp.where(
        draw < hide, mask_id, jnp.where(draw < hide + randomise, random, ids)
    )
    return jnp.where(chosen, new, ids)


def replace_by_similar(
    key: jax.Array,
    ids: jax.Array,
    chosen: jax.Array,
    words: jax.Array,  # [S], equal for the pieces of a word
    word_id: jax.Array,  # [S], which word it is; 0: none that the table has
    *,
    table,  # data.similar.Similar: pieces [W, L], sizes [W], near [W, K]
    mask_id: int,
    vocab_size: int,
    hide: float,
    randomise: float,
) -> jax.Array:
    """Each chosen word becomes one of its similar words, each as probable, or any word
    of the table with as many pieces, or is kept: all of its pieces alike.

    A word that has no similar one, or was cut where the row ends, becomes any word,
    too; where the table has none of so many pieces, each of them becomes any piece but
    [MASK].
    """
    S, index = ids.shape[0], jnp.arange(ids.shape[0])
    begins, ends = edges_of_words(words)
    first = jax.lax.cummax(jnp.where(begins, index, 0))
    last = jax.lax.cummin(jnp.where(ends, index, S - 1), reverse=True)
    size = last - first + 1

    draw_key, which_key, piece_key = jax.random.split(key, 3)
    draw = jax.random.uniform(draw_key, (S,))[first]
    which = jax.random.uniform(which_key, (S,))[first]
    random = jax.random.randint(piece_key, (S,), 0, vocab_size - 1, ids.dtype)
    random += random >= mask_id

    pieces, sizes, near = (
        jnp.asarray(x) for x in (table.pieces, table.sizes, table.near)
    )
    word = jnp.abs(word_id)
    similar = near[word]  # [S, K], filled up with 0
    choices = jnp.sum(similar > 0, -1)
    taken = jnp.minimum((which * choices).astype(jnp.int32), choices - 1)
    similar = jnp.take_along_axis(similar, jnp.clip(taken, 0)[:, None], -1)[:, 0]
    place = index - first
    turned = (word_id < 0).any()  # the row, also where no word is the table's
    place = jnp.where(turned, size - 1 - place, place)
    place = jnp.clip(place, 0, pieces.shape[1] - 1)
    # Any word: of those with n pieces the first is by_size[start[n]].
    by_size = np.argsort(table.sizes, kind="stable")
    count = np.bincount(table.sizes, minlength=S + 1)
    start, count = jnp.asarray(np.cumsum(count) - count), jnp.asarray(count)[size]
    taken = jnp.minimum((which * count).astype(jnp.int32), count - 1)
    other = jnp.asarray(by_size)[start[size] + jnp.clip(taken, 0)]
    random = jnp.where(count > 0, pieces[other, place], random)
    known = (choices > 0) & (sizes[word] == size)
    changed = jnp.where(known, pieces[similar, place], random)
    new = jnp.where(
        draw < hide, changed, jnp.where(draw < hide + randomise, random, ids)
    )
    return jnp.where(chosen, new, ids)
