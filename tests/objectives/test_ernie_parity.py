"""ERNIE 2.0's objectives against its classes in transformers: losses and gradients."""

import jax
import numpy as np
import pytest
import torch

from bert_jax import parity
from bert_jax.convert import engine
from bert_jax.convert.tables import LAYOUTS
from bert_jax.models.heads import HEADS, OUTPUTS
from bert_jax.objectives.capitalisation import Capitalisation
from bert_jax.objectives.discourse_relation import DiscourseRelation
from bert_jax.objectives.ir_relevance import IRRelevance
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.sentence_distance import SentenceDistance
from bert_jax.objectives.sentence_reordering import SentenceReordering
from bert_jax.objectives.token_document import TokenDocument
from bert_jax.parity import OUTPUT, excess
from bert_jax.presets import preset
from bert_jax.step import row_keys
from tests.models.made import assert_same_gradients
from tests.objectives.made import SPECIAL, labelled, random_texts
from tests.objectives.test_collator import as_batch, collated, gradients_in, scored

MEMBER = preset("ernie-2.0-base-en")
LAYOUT = LAYOUTS[MEMBER.layout]
V, S, B, LABELS, TASK_TYPES = 100, 32, 16, 5, 4
# Of the pieces 5, 7, ... the next one is the form with a capital.
SMALL = tuple(n - 1 if n > 5 and n % 2 == 0 else n for n in range(V))
TASKS = (
    Capitalisation(SMALL, task=1),
    TokenDocument(task=2),
    SentenceReordering(task=3),
    SentenceDistance(task=3),
    DiscourseRelation(task=1),
    IRRelevance(task=2),
)


@pytest.fixture(scope="module")
def tiny_ernie():
    """Its choices at a tiny size; attention is sharp and no bias is 0."""
    arch = parity.tiny(MEMBER.arch).but(vocab_size=V, labels=LABELS)
    assert (arch.task_types, arch.types) == (TASK_TYPES, 4)
    heads = ("lm", "nsp", "pooler", *(task.heads[-1] for task in TASKS))
    return arch, parity.sharp_params(arch, heads=heads)


def with_heads(params: dict, heads: tuple[str, ...]) -> dict:
    return {n: leaf for n, leaf in params.items() if n not in HEADS or n in heads}


def told(task: int, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return rows | {"task_type_ids": torch.full_like(rows["input_ids"], task)}


@pytest.mark.parametrize("task", range(0, TASK_TYPES, 3))
def test_masked_lm_on_the_collators_rows(tiny_tokenizer, tiny_ernie, task):
    """Each task's loss is theirs for that task, and not for another."""
    arch, params = tiny_ernie
    assert tiny_tokenizer.size == V
    rows = dict(collated(tiny_tokenizer, whole=False))
    shown, labels = rows["input_ids"], rows["labels"]
    assert not ((labels >= 0) & (shown == 0)).any()  # torch gives [PAD] no gradient
    rows["next_sentence_label"] = torch.arange(len(labels)) % 2
    of = MaskedLM(V, tiny_tokenizer.mask_id, SPECIAL, task=task)
    mine = with_heads(params, of.heads)
    loss, gradients = scored(of, arch, mine, as_batch(rows))
    tensors, _ = engine.to_theirs(mine, arch, LAYOUT, heads=of.heads)
    theirs = parity.their_model(arch, LAYOUT, of.heads, tensors)
    assert type(theirs).__name__ == MEMBER.reference == "ErnieForPreTraining"
    losses = {n: theirs(**told(n, rows)).loss for n in range(TASK_TYPES)}
    for number, its in losses.items():
        same = excess(loss, its.detach(), **OUTPUT) <= 1
        assert same == (number == task), number
    losses[task].backward()
    expected = gradients_in(theirs, mine, arch, LAYOUT, heads=of.heads)
    assert_same_gradients(gradients, expected)
    grown = gradients["embed"]["task"].any(1)
    assert grown.tolist() == [n == task for n in range(TASK_TYPES)]


def apart(column: np.ndarray, group: np.ndarray, *, fill: int = 0) -> torch.Tensor:
    """Packed rows as theirs reads them: one group a row, padded."""
    rows = [
        row[own == n]
        for row, own in zip(column, group, strict=True)
        for n in np.unique(own[own > 0])
    ]
    length = max(map(len, rows))
    pads = [(0, length - len(row)) for row in rows]
    filled = [
        np.pad(row, pad, constant_values=fill)
        for row, pad in zip(rows, pads, strict=True)
    ]
    return torch.tensor(np.stack(filled)).long()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_heads_on_packed_rows(tiny_ernie, task):
    """Ours packed, theirs each example, or half of one, in a row of its own."""
    arch, params = tiny_ernie
    head = task.heads[-1]
    arch = arch.but(labels=OUTPUTS.get(head, LABELS))
    rng = np.random.default_rng(0)
    batch = labelled(random_texts(B, S, vocab=40, longest=2), S)
    batch["types"] = rng.integers(0, arch.types, (B, S)).astype(np.int32)
    pooled = "pooler" in task.heads
    given = task.labels if pooled else ""  # the others make their own
    if given:
        drawn = rng.integers(-1, arch.labels, batch[given].shape)
        batch[given] = np.where(batch[given] >= 0, drawn, -1).astype(np.int32)
    keys = row_keys(jax.random.key(0), batch["row_id"])
    out = jax.device_get(dict(task.corrupt(keys, batch)))
    group, targets, asked = out["group"], out["targets"], out["weights"] > 0
    assert set(targets[asked]) == set(range(arch.labels))
    mine = with_heads(params, task.heads)
    loss, gradients = scored(task, arch, mine, out)

    # The head has another name there.
    heads, name = (("pooler", "classify"), "classify") if pooled else (("tag",), "tag")
    renamed = with_heads(params, task.heads)
    renamed[name] = renamed.pop(head)
    tensors, _ = engine.to_theirs(renamed, arch, LAYOUT, heads=heads)
    kernel = np.asarray(params[head]["dense"]["kernel"])
    np.testing.assert_array_equal(tensors["classifier.weight"], kernel.T)
    theirs = parity.their_model(arch, LAYOUT, heads, tensors)
    kind = "Sequence" if pooled else "Token"
    assert type(theirs).__name__ == f"ErnieFor{kind}Classification"
    assert theirs.num_labels == arch.labels

    labels = np.where(asked, targets, -100)
    if pooled:
        slots = np.arange(labels.shape[1]) < group.max(1, keepdims=True)
        assert (labels[slots] < 0).any() == bool(given)  # -1 there is no label
        labels = torch.tensor(labels[slots]).long()
    else:
        labels = apart(labels, group, fill=-100)
    rows = {
        "input_ids": apart(out["ids"], group),
        "token_type_ids": apart(out["types"], group),
        "position_ids": apart(out["positions"], group),
        "attention_mask": apart(group > 0, group),
        "labels": labels,
    }
    examples = batch["group"].max(1).sum()
    assert examples > B
    halved = len(rows["input_ids"]) > examples
    assert halved == (task.name == "token_document")
    assert not rows["attention_mask"].all()
    losses = {n: theirs(**told(n, rows)).loss for n in range(TASK_TYPES)}
    for number, its in losses.items():
        same = excess(loss, its.detach(), **OUTPUT) <= 1
        assert same == (number == task.task), number
    losses[task.task].backward()
    expected = gradients_in(theirs, renamed, arch, LAYOUT, heads=heads)
    expected[head] = expected.pop(name)
    assert_same_gradients(gradients, expected)
    assert all(np.abs(leaf).max() > 0 for leaf in gradients[head]["dense"].values())
