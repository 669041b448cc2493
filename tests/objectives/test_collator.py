"""Masked LM on what transformers itself has hidden: its collator's rows, its losses."""

import jax
import numpy as np
import pytest
import torch
import transformers

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS
from bert_jax.models.model import Model
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.parity import OUTPUT, excess
from bert_jax.presets import preset
from bert_jax.step import Net
from tests import tiny
from tests.models.made import assert_same_gradients, drawn_params, quick_jit
from tests.objectives.made import SPECIAL

# What their classes call the label of a pair.
PAIRS = {
    "BertForPreTraining": "next_sentence_label",
    "AlbertForPreTraining": "sentence_order_label",
}


def collated(tokenizer, *, whole: bool) -> dict[str, torch.Tensor]:
    """Pairs of sentences as the collator pads and hides them. Its whole words are all
    shown as [MASK]: it offers nothing else for them."""
    vocab = {piece: number for number, piece in enumerate(tokenizer.vocab)}
    theirs = transformers.BertTokenizer(vocab=vocab)
    words = (tiny.SUBJECTS, tiny.VERBS, tiny.OBJECTS)
    texts = [" ".join(parts) for parts in zip(*words, strict=True)]
    others = [*texts[3:], "unpaintable", "rememberers", "a cat"]
    told = dict(return_special_tokens_mask=True, return_offsets_mapping=whole)
    columns = theirs(texts, others, padding=True, **told)
    return transformers.DataCollatorForLanguageModeling(
        theirs,
        whole_word_mask=whole,
        mlm_probability=0.3,
        mask_replace_prob=1.0 if whole else 0.5,
        random_replace_prob=0.0 if whole else 0.25,
        seed=0,
    )([{name: columns[name][row] for name in columns} for row in range(len(texts))])


def as_batch(rows: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The same rows as an objective scores them."""
    rows = {name: column.numpy().astype(np.int32) for name, column in rows.items()}
    labels = rows["labels"]
    asked = labels >= 0
    where = np.argsort(~asked, axis=1, kind="stable")[:, : asked.sum(1).max()]
    at = np.take_along_axis(labels, where, 1)
    return {
        "ids": rows["input_ids"],
        "types": rows["token_type_ids"],
        "positions": np.broadcast_to(np.arange(labels.shape[1]), labels.shape),
        "group": rows["attention_mask"],
        "where": np.where(at >= 0, where, 0),
        "targets": np.maximum(at, 0),
        "weights": (at >= 0).astype(np.float32),
        "first": np.zeros((len(labels), 1), np.int32),
        "next_sentence": rows["next_sentence_label"][:, None],
    }


@pytest.mark.parametrize("name", ["BertForMaskedLM", *PAIRS])
@pytest.mark.parametrize("whole", [False, True], ids=["tokens", "words"])
def test_loss_and_gradients_on_the_collators_rows(tiny_tokenizer, whole, name):
    rows = collated(tiny_tokenizer, whole=whole)
    labels, shown = rows["labels"], rows["input_ids"]
    hidden, asked = shown == tiny_tokenizer.mask_id, labels >= 0
    kept, random = asked & (shown == labels), asked & ~hidden & (shown != labels)
    assert hidden.any()
    assert kept.any() == random.any() == (not whole)
    pieces = np.array(tiny_tokenizer.vocab)[torch.where(asked, labels, shown)]
    goes_on = torch.tensor(np.char.startswith(pieces, "##"))[:, 1:]
    together = (asked[:, 1:] & asked[:, :-1])[goes_on & asked[:, 1:]]
    assert together.any()
    assert together.all() == whole
    assert not rows["attention_mask"].all()
    assert not (random & (shown == 0)).any()  # torch gives [PAD] no gradient
    rows["next_sentence_label"] = torch.arange(len(labels)) % 2

    member = preset("albert-base-v2" if name.startswith("Albert") else "bert-tiny")
    sizes = dict(vocab_size=tiny_tokenizer.size, dropout=0.0, attention_dropout=0.0)
    arch, layout = parity.tiny(member.arch).but(**sizes), LAYOUTS[member.layout]
    of = MaskedLM(
        arch.vocab_size,
        tiny_tokenizer.mask_id,
        SPECIAL,
        pair_head=member.pair_head,
        next_sentence=1.0 if name in PAIRS else 0.0,
    )
    # Half as large as elsewhere: that of a bias of keys, which is 0 but for rounding,
    # grows with all other gradients.
    params = jax.tree.map(lambda x: x / 2, drawn_params(arch, heads=of.heads))
    batch = as_batch(dict(rows))

    @quick_jit
    def compute(params):
        def total(params):
            return loss_of(of, of.terms(Net(Model(arch), params), batch).means)

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(total)(params)

    loss, gradients = jax.device_get(compute(params))
    tensors, _ = engine.to_theirs(params, arch, layout, heads=of.heads)
    theirs = parity.their_model(arch, layout, of.heads, tensors)
    assert type(theirs).__name__ == name
    pairs = rows.pop("next_sentence_label")
    out = theirs(**rows, **({PAIRS[name]: pairs} if name in PAIRS else {}))
    out.loss.backward()
    assert excess(loss, out.loss.detach(), **OUTPUT) <= 1
    repeats = layout.repeats(arch, of.heads)
    its = {repeats.get(n, n): p.grad for n, p in theirs.named_parameters()}
    flat = engine.flatten(params)
    expected = parity.gradients_of(its, arch, layout, of.heads, flat)
    assert_same_gradients(gradients, engine.unflatten(expected))
