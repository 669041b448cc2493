"""What the scores of a packed row hear of its clean text: their own example where it is
shown, in UniLM's forms as much of it as the form lets them, and nothing of what is
hidden or replaced, their own target first of all.

Through `terms`, exactly: every score is differentiated with respect to the vector of
every clean token, which stands in the input wherever that token is shown.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models.model import Model
from bert_jax.objectives.base import Objective
from bert_jax.objectives.losses import binary_cross_entropy, cross_entropy
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.replaced_token import ReplacedToken
from bert_jax.objectives.unilm import FORMS, UniLM
from bert_jax.step import Net, row_keys
from tests.models.made import TINY, drawn_params, quick_jit
from tests.objectives.made import MASK, SPECIAL, labelled, random_texts

S, V = 32, TINY.vocab_size
HIDDEN = dict(rate=0.3, hide=1.0)
PAIRS = dict(randomise=0.0, choose="span", boundary=1.0)
OBJECTIVES = {
    "nsp": MaskedLM(V, MASK, SPECIAL, **HIDDEN, **PAIRS),
    "sop": MaskedLM(V, MASK, SPECIAL, **HIDDEN, **PAIRS, pair_head="sop"),
    "replaced": ReplacedToken(V, MASK, SPECIAL, **HIDDEN, generator=0.5),
    "unilm": UniLM(V, MASK, SPECIAL, **HIDDEN, randomise=0.0),
}


def rows(of: Objective) -> dict[str, np.ndarray]:
    """Every row has several examples; for UniLM, of two parts, and enough for all of
    its forms."""
    if not isinstance(of, UniLM):
        return labelled(random_texts(3, S, vocab=V, seed=4), S)
    batch = labelled(random_texts(6, S, vocab=V, seed=4), S)
    sizes = (batch["group"][:, :, None] == batch["group"][:, None]).sum(-1)
    second = (batch["group"] > 0) & (batch["positions"] >= sizes // 2)
    return batch | {"types": second.astype(np.int32)}


def allowed(of: Objective, form: int, types: np.ndarray, here: int) -> np.ndarray:
    """What a token of a row may see by its form, wherever it is: bool [S]."""
    if not isinstance(of, UniLM):
        return np.ones(S, bool)
    place = np.arange(S)
    return {
        "bidirectional": place >= 0,
        "seq2seq": (types == 0) | ((types[here] == 1) & (place <= here)),
        "left_to_right": place <= here,
        "right_to_left": place >= here,
    }[FORMS[form]]


def losses(head: str, scores, batch, replaced):
    """Of every score by itself."""
    if head == "rtd":
        return binary_cross_entropy(scores, replaced)
    pairs = head in ("nsp", "sop")
    return cross_entropy(scores, batch["label"] % 2 if pairs else batch["targets"])


@cache
def heard(of: Objective) -> tuple[dict, dict]:
    """For each head: how much each of its losses [B, N] moves with each clean vector
    [B, S], and where its net was shown the clean piece; and the corrupted batch."""
    arch = TINY.but(types=6) if isinstance(of, UniLM) else TINY
    model = Model(arch, towers=of.towers(arch))
    params = drawn_params(arch, heads=of.heads, towers=of.towers(arch))
    table = jnp.asarray(params["embed"]["token"])
    clean = rows(of)
    keys = row_keys(jax.random.key(0), clean["row_id"])
    batch = quick_jit(of.corrupt)(keys, clean)

    def scores(vectors):
        each, shown = {}, {}

        def net(tokens, **asked):
            same = tokens.ids == clean["ids"]
            given = jnp.where(same[..., None], vectors, table[tokens.ids])
            out = Net(model, params)(tokens.replace(vectors=given), **asked)
            for head in {"lm", "nsp", "sop", "sbo", "rtd"} & {*out}:
                each[head] = losses(head, out[head], batch, ~same)
                shown[head] = same
            return out

        of.terms(net, batch)
        return each, shown

    @quick_jit
    def compute(vectors):
        found, shown = jax.jacrev(scores, has_aux=True)(vectors)
        return {head: jnp.abs(x).max(-1) for head, x in found.items()}, shown

    return jax.device_get((*compute(table[clean["ids"]]), batch))


# By head: the column that says where its scores belong, None if to every token; and the
# one that says which of them count.
BELONGS = {
    "lm": ("where", "weights"),
    "sbo": ("where", "bounded"),
    "nsp": ("first", "next_sentence"),
    "sop": ("first", "next_sentence"),
    "rtd": (None, "group"),
}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(("nsp", head) for head in ("lm", "nsp", "sbo")),
        ("sop", "sop"),
        *(("replaced", head) for head in ("lm", "rtd")),
        *(("unilm", head) for head in ("lm", "nsp")),
    ],
)
def test_scores_hear_their_own_example_where_it_is_shown(name: str, head: str):
    of = OBJECTIVES[name]
    found, shown, batch = heard(of)
    group, types = batch["group"], rows(of)["types"]
    forms = batch.get("form", np.zeros(len(group), int))
    place, counts = BELONGS[head]
    at = np.indices(group.shape)[1] if place is None else batch[place]
    asked = batch[counts] >= 0 if place == "first" else batch[counts] > 0
    own, others, asked_in = set(), 0, set()
    for row, slot in np.argwhere(asked):
        here = at[row, slot]
        example = group[row] == group[row, here]
        sees = np.zeros(group.shape, bool)
        sees[row] = example & shown[head][row]
        sees[row] &= allowed(of, forms[row], types[row], here)
        np.testing.assert_array_equal(found[head][row, slot] > 0, sees)
        assert head != "lm" or not sees[row, here]  # its own target
        own.add(group[row, here])
        asked_in.add(int(forms[row]))
        others += (~shown[head][row] & example).sum()
    assert len(own) > 1
    assert others > 0
    every = {*range(len(FORMS))} if (name, head) == ("unilm", "lm") else {0}
    assert asked_in == every
