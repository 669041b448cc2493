"""XLNet's factorisation order: which tokens are predicted, and who is known by then.

A row is cut into two halves, and each is put into a random order of its own. Runs of
tokens are chosen to be predicted, one in K of all; the other words of a half are known
from the start, and a prediction knows them and what comes before it in the order. The
second half knows all of the first, which knows nothing of it. As ranks (a token
sees ranks up to its own, a query only smaller ones), R the length of the first half:

    first half    -1 for words that are not predicted, else the place in the order
    second half   R for words that are not predicted, else R + 1 + that place

A functional token ([CLS], [SEP]) keeps its place in the order and is never predicted
(Yang et al. 2019, arXiv:1906.08237, sections 2.2 to 2.5).

Runs have n = 1..5 pieces with p ~ 1/n and begin with a word. The paper speaks of
tokens; the release means to count words, but looks for the next word at the same place
again and again, so that it counts pieces: so do we, and only so it is one in K.
Differs from the release in: what is predicted is made up to its number from words alone
(there from all tokens, of which the functional ones are dropped afterwards); a run may
end at the end of its half; every special piece is functional.

Everything here is for one row [S], as in corrupt.py.
"""

import jax
import jax.numpy as jnp

from bert_jax.objectives.corrupt import choose


def choose_runs(
    key: jax.Array,
    candidates: jax.Array,  # bool [S]
    begins: jax.Array,  # bool [S], where a run may begin
    count: jax.Array,
    *,
    partial: int,
    longest: int,
) -> jax.Array:
    """At most `count` of the candidates, in runs with room around them: bool [S].

    From left to right: n pieces are taken in a context of n * partial others, the part
    on their left uniform, until `count` are taken or the end is reached.
    """
    S = candidates.shape[0]
    index = jnp.arange(S)
    trips = -(-S // (partial + 1))  # a run and its context are at least so long
    size_key, place_key = jax.random.split(key)
    odds = 1 / jnp.arange(1, longest + 1)
    sizes = 1 + jax.random.choice(size_key, longest, (trips,), p=odds / odds.sum())
    shares = jax.random.uniform(place_key, (trips,))

    def take(state, drawn):
        taken, at = state
        size, share = drawn
        size = jnp.minimum(size, count - taken.sum())
        left = jnp.floor(share * (size * partial)).astype(jnp.int32)
        begin = jnp.min(jnp.where(begins & (index >= at + left), index, S))
        end = begin + size
        run = (index >= begin) & (index < end) & (end <= S)
        # A run that does not fit is the last: there is no room for another.
        return (taken | (run & candidates), end + size * partial - left), None

    first = (jnp.zeros_like(candidates), jnp.int32(0))
    (taken, _), _ = jax.lax.scan(take, first, (sizes, shares))
    return taken


def ranks_of(
    candidates: jax.Array,  # bool [S], words
    chosen: jax.Array,  # bool [S], those that are predicted
    order: jax.Array,  # [S], the place of each in the order of its half
) -> jax.Array:
    """Who is known by when, as the table above has it: int32 [S]."""
    S = len(order)
    R = S // 2
    own = jnp.where(candidates & ~chosen, -1, order)
    return jnp.where(jnp.arange(S) < R, own, R + 1 + own).astype(jnp.int32)


def permute(
    key: jax.Array,
    candidates: jax.Array,  # bool [S], words
    real: jax.Array,  # bool [S], all but padding
    words: jax.Array,  # [S], equal for the pieces of a word
    *,
    partial: int,
    longest: int,
) -> tuple[jax.Array, jax.Array]:
    """What is predicted, bool [S], and the ranks, int32 [S].

    Of n real tokens ⌊n / partial⌋ are predicted, shared out between the halves by their
    length, the odd one in the first: of 512 tokens 43 and 42.
    """
    S = candidates.shape[0]
    R = S // 2
    begins = candidates & (words != jnp.pad(words, (1, 0))[:S])
    total = real.sum() // partial
    early = -(-total * real[:R].sum() // jnp.maximum(real.sum(), 1))
    halves = []
    for number, count in enumerate((early, total - early)):
        half = slice(R, S) if number else slice(0, R)
        keys = jax.random.split(jax.random.fold_in(key, number), 3)
        words_there = candidates[half]
        chosen = choose_runs(
            keys[0],
            words_there,
            begins[half],
            count,
            partial=partial,
            longest=longest,
        )
        # What lacks, piece by piece.
        chosen |= choose(keys[1], words_there & ~chosen, count - chosen.sum())
        order = jnp.argsort(jax.random.uniform(keys[2], chosen.shape))
        halves.append((chosen, order))
    chosen, order = (jnp.concatenate(parts) for parts in zip(*halves, strict=True))
    return chosen, ranks_of(candidates, chosen, order)
