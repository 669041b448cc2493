"""Classification and tagging: by hand, and as the classes of transformers have it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.classify import Classify
from bert_jax.objectives.tag import Tag
from bert_jax.parity import GRADIENT, OUTPUT, QUICK, excess
from bert_jax.step import Net
from tests import reference

ARCH = Arch(vocab_size=50, width=16, layers=2, heads=2, inner=32, max_positions=12)
ARCH = ARCH.but(labels=3, dropout=0.0, attention_dropout=0.0)
CLASSES = {
    "classify": (Classify(), "BertForSequenceClassification"),
    "tag": (Tag(), "BertForTokenClassification"),
}


def batch_of(rows: reference.Rows, *, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    fields = ("ids", "types", "positions", "group")
    batch = {name: rows.batch()[name] for name in fields}
    batch["label"] = rng.integers(0, 3, (len(rows.ids), 1)).astype(np.int32)
    tags = rng.integers(0, 3, rows.ids.shape).astype(np.int32)
    spared = rng.random(rows.ids.shape) < 0.4  # inside words
    batch["tags"] = np.where(rows.real & ~spared, tags, -1)
    return batch


@pytest.mark.parametrize("name", CLASSES)
def test_loss_and_gradient_are_those_of_transformers(name):
    objective, kind = CLASSES[name]
    theirs = reference.reference_model(ARCH, kind=kind)
    rows = reference.random_rows(ARCH, [12, 7, 9, 3], 12)
    batch = batch_of(rows)
    labels = batch["label"][:, 0] if name == "classify" else batch["tags"]
    labels = torch.tensor(np.where(labels < 0, -100, labels)).long()
    out = theirs(
        input_ids=torch.tensor(rows.ids),
        token_type_ids=torch.tensor(rows.types),
        attention_mask=torch.tensor(rows.real.astype(np.int64)),
        labels=labels,
    )
    out.loss.backward()
    params = reference.ours_from(theirs, ARCH)

    def loss(params):
        net = Net(Model(ARCH), params)
        terms = objective.terms(net, batch)
        return loss_of(objective, terms.means, objective.counts(batch))

    found, gradient = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)
    assert excess(found, out.loss.detach().numpy(), **OUTPUT) <= 1
    theirs_by_name = dict(theirs.named_parameters())
    head = gradient[name]["dense"]
    for ours, their in ((head["kernel"].T, "weight"), (head["bias"], "bias")):
        expected = theirs_by_name[f"classifier.{their}"].grad.numpy()
        assert excess(ours, expected, **GRADIENT) <= 1
    expected = theirs_by_name["bert.embeddings.word_embeddings.weight"].grad.numpy()
    assert excess(gradient["embed"]["token"][:50], expected, **GRADIENT) <= 1


def test_the_loss_by_hand_leaves_out_what_has_no_label():
    """Two labels with logits 0 and ln 3: -log 1/4 and -log 3/4; the third row is
    padding."""
    logits = jnp.asarray([[[0.0, np.log(3)]]] * 3)
    batch = {"ids": jnp.zeros((3, 4), int), "label": jnp.asarray([[0], [1], [-1]])}
    batch |= {name: batch["ids"] for name in ("types", "positions", "group")}
    objective = Classify()
    means = objective.terms(lambda *_, **__: {"classify": logits}, batch).means
    expected = (np.log(4) + np.log(4 / 3)) / 2
    assert loss_of(objective, means) == pytest.approx(expected, rel=1e-6)
    assert float(means["classify_accuracy"].value) == 0.5
    assert objective.counts(batch) == {"classify_loss": 2}


def test_tags_by_hand():
    logits = jnp.broadcast_to(jnp.asarray([0.0, np.log(3)]), (1, 4, 2))
    batch = {"ids": jnp.zeros((1, 4), int), "tags": jnp.asarray([[-1, 1, -1, 0]])}
    batch |= {name: batch["ids"] for name in ("types", "positions", "group")}
    objective = Tag()
    means = objective.terms(lambda *_, **__: {"tag": logits}, batch).means
    expected = (np.log(4) + np.log(4 / 3)) / 2
    assert loss_of(objective, means) == pytest.approx(expected, rel=1e-6)
    assert objective.counts(batch) == {"tag_loss": 2}


def test_a_causal_model_tags_without_what_follows():
    """The gradient of a word's tag with respect to later ones is exactly zero."""
    arch = ARCH.but(order="causal")
    params = reference.fresh_params(arch, heads=("tag",))
    rows = reference.random_rows(arch, [8], 8)
    batch = batch_of(rows)

    @jax.jit
    def influence(vectors, place):
        def score(vectors):
            class Patched(Net):
                def __call__(self, tokens, **asked):
                    tokens = tokens.replace(vectors=vectors)
                    return Net.__call__(self, tokens, **asked)

            logits = Tag(order="causal").logits(Patched(Model(arch), params), batch)
            return logits[0, place, 0]

        return jnp.abs(jax.grad(score)(vectors)[0]).sum(-1)

    vectors = params["embed"]["token"][rows.ids]
    found = np.asarray(influence(vectors, 3))
    assert (found[:4] > 0).all()
    assert (found[4:] == 0).all()


def test_an_order_that_there_is_not():
    with pytest.raises(InputError, match=r"unknown objective\.order 'causl'.*causal"):
        Tag(order="causl")
