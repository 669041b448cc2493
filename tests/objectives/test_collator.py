"""Masked LM, and ELECTRA's generator, on what transformers itself has hidden: its
collator's rows, its losses."""

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
from bert_jax.objectives.replaced_token import ReplacedToken
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


# Its whole words are all shown as [MASK]: it offers nothing else for them.
TOKENS = dict(mlm_probability=0.3, mask_replace_prob=0.5, random_replace_prob=0.25)
WHOLE = dict(mlm_probability=0.3, mask_replace_prob=1.0, random_replace_prob=0.0)
ELECTRA = dict(mlm_probability=0.15, mask_replace_prob=0.85, random_replace_prob=0.0)


def collated(
    tokenizer, *, whole: bool = False, times: int = 1, **shares: float
) -> dict[str, torch.Tensor]:
    """Pairs of sentences, each so many times, as the collator pads and hides them."""
    vocab = {piece: number for number, piece in enumerate(tokenizer.vocab)}
    theirs = transformers.BertTokenizer(vocab=vocab)
    words = (tiny.SUBJECTS, tiny.VERBS, tiny.OBJECTS)
    texts = [" ".join(parts) for parts in zip(*words, strict=True)]
    others = [*texts[3:], "unpaintable", "rememberers", "a cat"]
    told = dict(return_special_tokens_mask=True, return_offsets_mapping=whole)
    columns = theirs(texts, others, padding=True, **told)
    rows = [{name: columns[name][row] for name in columns} for row in range(len(texts))]
    return transformers.DataCollatorForLanguageModeling(
        theirs, whole_word_mask=whole, seed=0, **shares
    )(rows * times)


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


def scored(of, arch, params: dict, batch: dict) -> tuple:
    """The loss of an objective, and its gradients."""

    @quick_jit
    def compute(params, batch):
        def total(params):
            return loss_of(of, of.terms(Net(Model(arch), params), batch).means)

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(total)(params)

    return jax.device_get(compute(params, batch))


def gradients_in(theirs, params: dict, arch, layout, *, heads) -> dict:
    """What their loss left in their model, as our tree."""
    repeats = layout.repeats(arch, heads)
    its = {repeats.get(n, n): p.grad for n, p in theirs.named_parameters()}
    flat = engine.flatten(params)
    return engine.unflatten(parity.gradients_of(its, arch, layout, heads, flat))


@pytest.mark.parametrize("name", ["BertForMaskedLM", *PAIRS])
@pytest.mark.parametrize("whole", [False, True], ids=["tokens", "words"])
def test_loss_and_gradients_on_the_collators_rows(tiny_tokenizer, whole, name):
    rows = collated(tiny_tokenizer, whole=whole, **(WHOLE if whole else TOKENS))
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
    loss, gradients = scored(of, arch, params, as_batch(dict(rows)))
    tensors, _ = engine.to_theirs(params, arch, layout, heads=of.heads)
    theirs = parity.their_model(arch, layout, of.heads, tensors)
    assert type(theirs).__name__ == name
    pairs = rows.pop("next_sentence_label")
    out = theirs(**rows, **({PAIRS[name]: pairs} if name in PAIRS else {}))
    out.loss.backward()
    assert excess(loss, out.loss.detach(), **OUTPUT) <= 1
    expected = gradients_in(theirs, params, arch, layout, heads=of.heads)
    assert_same_gradients(gradients, expected)


def test_replaced_tokens_on_the_collators_rows(tiny_tokenizer):
    """ELECTRA's 15 %, of which 85 % are hidden. Pieces are drawn here from what its
    class for the generator says, and put into the text; its class for the model is
    asked which they are. With the same draws both losses, and all gradients, agree."""
    rows = collated(tiny_tokenizer, times=4, **ELECTRA)
    labels, shown = rows["labels"].numpy(), rows["input_ids"].numpy()
    asked, hidden = labels >= 0, shown == tiny_tokenizer.mask_id
    assert (shown == labels)[asked & ~hidden].all()
    assert (asked & hidden).any()
    assert (asked & ~hidden).any()
    rows["next_sentence_label"] = torch.zeros(len(labels), dtype=torch.long)
    batch, clean = as_batch(dict(rows)), np.where(asked, labels, shown)
    draws = np.random.default_rng(0).uniform(size=batch["where"].shape)
    batch |= {"clean": clean.astype(np.int32), "draws": draws.astype(np.float32)}

    member = preset("electra-small-discriminator")
    sizes = dict(vocab_size=tiny_tokenizer.size, dropout=0.0, attention_dropout=0.0)
    arch, layout = parity.tiny(member.arch).but(**sizes), LAYOUTS[member.layout]
    told = (arch.vocab_size, tiny_tokenizer.mask_id, SPECIAL)
    of = ReplacedToken(*told, generator=0.5, weight=1.0)  # as tolerances are meant
    towers = of.towers(arch)
    params = drawn_params(arch, heads=of.heads, towers=towers)
    params = jax.tree.map(lambda x: x / 2, params)
    model = Model(arch, towers=towers)

    @quick_jit
    def compute(params):
        def total(params):
            means = of.terms(Net(model, params), batch).means
            return loss_of(of, means), means

        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(total, has_aux=True)(params)

    (_, means), gradients = jax.device_get(compute(params))

    def theirs(arch, tree, heads, ids, labels):
        """The class, its loss, its logits, and its gradients under our names."""
        tensors, extra = engine.to_theirs(tree, arch, layout, heads=heads)
        assert not extra
        reference = parity.their_model(arch, layout, heads, tensors)
        given = dict(rows, input_ids=torch.tensor(ids), labels=torch.tensor(labels))
        del given["next_sentence_label"]
        out = reference(**given)
        out.loss.backward()
        its = engine.flatten(gradients_in(reference, tree, arch, layout, heads=heads))
        loss, logits = out.loss.detach(), out.logits.detach().double().numpy()
        return type(reference).__name__, loss, logits, its

    guesser = {"embed": params["embed"], **params["generator"]}
    name, filled, logits, its = theirs(towers[0][1], guesser, ("lm",), shown, labels)
    assert name == "ElectraForMaskedLM"
    ids = clean.copy()
    for row, slot in np.argwhere(batch["weights"] > 0):
        here = batch["where"][row, slot]
        chances = np.exp(logits[row, here] - logits[row, here].max())
        so_far = np.cumsum(chances) / chances.sum()
        ids[row, here] = np.flatnonzero(so_far > batch["draws"][row, slot])[0]
    replaced = ids != clean
    assert asked.sum() > replaced.sum() > 0
    assert not (replaced & (ids == 0)).any()  # torch gives [PAD] no gradient
    main = {part: params[part] for part in params if part != "generator"}
    name, detected, _, whole = theirs(arch, main, ("rtd",), ids, replaced.astype(int))
    assert name == "ElectraForPreTraining"
    assert excess(means["masked_lm_loss"].value, filled, **OUTPUT) <= 1
    assert excess(means["replaced_token_loss"].value, detected, **OUTPUT) <= 1
    real = batch["group"] > 0
    share = float(means["replaced_token_share"].value)
    assert share == pytest.approx(replaced.sum() / real.sum())
    expected = dict(whole)
    for path, leaf in its.items():
        if path.startswith("embed/"):
            expected[path] = expected[path] + leaf
        else:
            expected[f"generator/{path}"] = leaf
    assert_same_gradients(gradients, engine.unflatten(expected))
