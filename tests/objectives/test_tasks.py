"""What all tasks of ERNIE 2.0 have in common, and those of a pair with a label."""

import math
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.labelled import read_labelled
from bert_jax.data.tokenizers import SPECIALS, WordPiece
from bert_jax.errors import InputError
from bert_jax.models.arch import Arch
from bert_jax.models.heads import OUTPUTS
from bert_jax.models.model import Model
from bert_jax.objectives import OBJECTIVES
from bert_jax.objectives.base import loss_of
from bert_jax.objectives.capitalisation import Capitalisation
from bert_jax.objectives.classify import Classify
from bert_jax.objectives.discourse_relation import DiscourseRelation
from bert_jax.objectives.ir_relevance import IRRelevance
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.sentence_distance import SentenceDistance
from bert_jax.objectives.sentence_reordering import SentenceReordering
from bert_jax.objectives.token_document import TokenDocument
from bert_jax.optim import Optim, make_optimizer
from bert_jax.step import Net, TrainState, make_train_step, row_keys
from tests.models.made import drawn_params, quick_jit
from tests.objectives.made import MASK, SPECIAL, FixedNet, labelled, random_texts
from tests.reference import assert_devices_do_not_talk, fresh_params

V, S, B = 60, 32, 16
# Of the pieces 5, 7, ... 57 the next one is the form with a capital.
SMALL = tuple(n - 1 if n > 5 and n % 2 == 0 else n for n in range(V))
TASKS = (
    Capitalisation(SMALL, task=1),
    TokenDocument(task=2),
    SentenceReordering(task=3),
    SentenceDistance(task=4),
    DiscourseRelation(task=5),
    IRRelevance(task=6),
)
ARCH = Arch(
    **dict(vocab_size=V, vocab_multiple=8, width=16, layers=2, heads=2, inner=32),
    **dict(max_positions=S, types=4, task_types=8, labels=7),
)
by_name = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def labelled_batch() -> dict[str, np.ndarray]:
    """Packed rows with every column that a task asks for."""
    return labelled(random_texts(B, S, vocab=V, longest=2), S)


def classes(task) -> int:
    return OUTPUTS.get(task.heads[-1], ARCH.labels)


@cache
def corrupt_of(task):
    def corrupt(batch, seed=0):
        return task.corrupt(row_keys(jax.random.key(seed), batch["row_id"]), batch)

    return quick_jit(corrupt)


@by_name
def test_loss_at_initialisation(task):
    """A fresh model knows nothing: ln of the number of classes; and the counts are
    known beforehand."""
    assert OBJECTIVES[task.name] is type(task)
    params = fresh_params(ARCH, heads=task.heads)
    batch = labelled_batch()
    assert set(task.columns) <= set(batch)
    batch = corrupt_of(task)(batch)

    @quick_jit
    def score(params, batch):
        means = task.terms(Net(Model(ARCH), params), batch).means
        return loss_of(task, means), means

    loss, means = score(params, batch)
    assert abs(float(loss) - math.log(classes(task))) < 0.1
    counts = task.counts(batch)
    assert set(counts) == set(task.weights) == {f"{task.name}_loss"}
    for name, count in counts.items():
        assert float(count) == float(means[name].count) > 20
    assert f"{task.name}_accuracy" in means


@by_name
def test_draws_are_fixed_by_their_keys_and_devices_do_not_talk(task):
    batch, corrupt = labelled_batch(), corrupt_of(task)
    assert_devices_do_not_talk(corrupt.__wrapped__, batch)
    one, again, other = (jax.device_get(corrupt(batch, seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    same = all((one[name] == other[name]).all() for name in one)
    assert same == (task.name != "sentence_reordering")  # the others draw nothing


def logits_for(task) -> FixedNet:
    shape = (B, 8) if "pooler" in task.heads else (B, S)
    return FixedNet(**{task.heads[-1]: jnp.zeros((*shape, classes(task)))})


@by_name
def test_every_token_is_told_its_task(task):
    """And at zero logits the loss is exactly ln of the number of classes."""
    batch = corrupt_of(task)(labelled_batch())
    net = logits_for(task)
    loss = loss_of(task, task.terms(net, batch).means)
    assert float(loss) == pytest.approx(math.log(classes(task)), rel=1e-5)
    np.testing.assert_array_equal(net.tokens.task, task.task)
    assert net.tokens.task.shape == (B, S)
    rows = "distance" if task.name == "sentence_distance" else "doc"
    assert task.problems(ARCH, rows) == []
    few = ARCH.but(task_types=task.task)
    assert task.problems(few, rows) == [
        f"objective.task={task.task}: it must be in 0..{task.task - 1}, since "
        f"arch.task_types={task.task}"
    ]


def test_masked_words_are_told_their_task():
    batch = labelled_batch()
    nets = {}
    for number in (0, 7):
        task = MaskedLM(V, MASK, SPECIAL, choose="ngram", next_sentence=0, task=number)
        out = corrupt_of(task)(batch)
        nets[number] = FixedNet(lm=jnp.zeros((*out["where"].shape, V)))
        task.terms(nets[number], out)
    assert nets[0].tokens.task is None  # the model takes it for 0
    np.testing.assert_array_equal(nets[7].tokens.task, 7)
    assert task.problems(ARCH, "doc") == []
    none = ARCH.but(task_types=0)
    assert task.problems(none, "doc") == [
        "objective.task=7: it must be in 0..0, since arch.task_types=0"
    ]
    assert MaskedLM(V, MASK, SPECIAL).problems(none, "doc") == []


def test_rows_that_do_not_fit():
    """Other rows have other labels, or no text to cut."""
    found = {task.name: task.problems(ARCH, "pair") for task in TASKS}
    assert {name: problems for name, problems in found.items() if problems} == {
        name: [f"{name} cannot use config.rows=pair: set it to {valid}"]
        for name, valid in (
            ("token_document", "doc"),
            ("sentence_reordering", "doc"),
            ("sentence_distance", "distance"),
        )
    }


# --- pairs with a label --------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS[3:], ids=lambda task: task.name)
def test_pairs_by_hand(task):
    label = "next_sentence" if task.name == "sentence_distance" else "label"
    C = classes(task)
    ids = jnp.zeros((2, 4), jnp.int32)
    batch = {name: ids for name in ("ids", "types", "positions", "group")}
    batch |= {
        "first": jnp.array([[0, 2], [0, 0]]),
        label: jnp.array([[2, 0], [1, -1]], jnp.int32),
    }
    assert task.columns == ("first", label)
    logits = np.zeros((2, 2, C), np.float32)
    logits[0, 0, :3] = np.log([0.5, 0.5, 2.0])
    logits[0, 1, :3] = np.log([0.25, 0.5, 0.25])
    logits[1, 0, 1] = 50.0
    logits[1, 1] = 7.0 * np.arange(C)  # an empty slot
    net = FixedNet(**{task.heads[-1]: jnp.asarray(logits)})
    out = task.corrupt(None, batch)
    means = task.terms(net, out).means
    rest = C - 3
    expected = (math.log(3 + rest) - math.log(2)) + (
        math.log(1 + rest) - math.log(0.25)
    )
    assert float(loss_of(task, means)) == pytest.approx(expected / 3, rel=1e-5)
    assert float(means[f"{task.name}_accuracy"].total) == 2
    assert float(means[f"{task.name}_accuracy"].count) == 3
    assert float(task.counts(out)[f"{task.name}_loss"]) == 3
    assert net.asked["heads"] == ("pooler", task.heads[-1])
    np.testing.assert_array_equal(net.asked["first"], batch["first"])


@by_name
def test_an_answer_hears_its_own_example_as_it_is_shown(task):
    """Through `terms`, exactly: each hears every token of its own example (of its half,
    where halves are apart), and no other of the row."""
    batch = {name: column[:4] for name, column in labelled_batch().items()}
    out = jax.device_get(corrupt_of(task)(batch))
    params = drawn_params(ARCH, heads=task.heads)
    vectors = jax.random.normal(jax.random.key(0), (4, S, ARCH.width))

    @quick_jit
    def heard(vectors):
        def losses(vectors):
            found = []

            def net(tokens, **asked):
                shown = tokens.replace(vectors=vectors)
                found.append(Net(Model(ARCH), params)(shown, **asked))
                return found[0]

            task.terms(net, out)
            each = cross_entropy(found[0][task.heads[-1]], out["targets"])
            return each.sum(0)  # rows hear nothing of each other: [G], or [S]

        return jnp.abs(jax.jacrev(losses)(vectors)).max(-1)  # [G, B, S]

    found = np.moveaxis(np.asarray(heard(vectors)), 0, 1) > 0
    group, asked = out["group"], out["weights"] > 0
    at = out["first"] if "pooler" in task.heads else np.indices(group.shape)[1]
    apart = 0
    for row, slot in np.argwhere(asked):
        own = group[row] == group[row, at[row, slot]]
        np.testing.assert_array_equal(found[row, slot], own)
        apart += ((group[row] > 0) & ~own).sum()
    assert asked.sum() > 4
    assert apart > 0


@pytest.mark.parametrize("task", TASKS[3:], ids=lambda task: task.name)
def test_the_label_is_not_shown(task):
    """Other labels, the same input. (Of the other tasks their own files say it.)"""
    batch, label = labelled_batch(), task.columns[-1]
    other = batch | {label: np.where(batch[label] >= 0, 2 - batch[label], -1)}
    one, two = (jax.device_get(corrupt_of(task)(rows)) for rows in (batch, other))
    nets = [logits_for(task), logits_for(task)]
    for net, out in zip(nets, (one, two), strict=True):
        task.terms(net, out)
    assert (one["targets"] != two["targets"]).any()
    jax.tree.map(np.testing.assert_array_equal, nets[0].tokens, nets[1].tokens)


def test_labels_that_the_head_has_not():
    names = [f"l{n}" for n in range(8)]
    for task in TASKS[4:]:
        task.check_labels(names[:3], ARCH)
    with pytest.raises(InputError) as error:
        TASKS[4].check_labels(names, ARCH)
    assert str(error.value) == (
        "discourse_relation: the data have 8 labels, l0, l1, l2, l3, l4, l5, l6, l7; "
        "its head has 7 (arch.labels)"
    )
    with pytest.raises(InputError, match="4 labels, l0, l1, l2, l3; its head has 3$"):
        TASKS[5].check_labels(names[:4], ARCH)
    with pytest.raises(InputError, match=r"^classify: .* its head has 7"):
        Classify().check_labels(names, ARCH)


def write_relations(path: Path, count: int) -> tuple[Path, Path]:
    """label, A, B: what B begins with tells the label; and the same with the labels of
    other lines."""
    rng = np.random.default_rng(0)
    joins = {"because": "cause", "but": "contrast", "then": "time"}
    words = [f"w{n}" for n in range(20)]
    lines = []
    for join in rng.choice(list(joins), count):
        a, b = (" ".join(rng.choice(words, 4)) for _ in range(2))
        lines.append([joins[join], f"{a}\t{join} {b}"])
    labels = rng.permutation([label for label, _ in lines])
    other = [[label, text] for label, (_, text) in zip(labels, lines, strict=True)]
    for name, rows in (("planted", lines), ("shuffled", other)):
        text = "".join("\t".join(row) + "\n" for row in rows)
        (path / f"{name}.tsv").write_text(text)
    return path / "planted.tsv", path / "shuffled.tsv"


@pytest.mark.parametrize("task", TASKS[4:], ids=lambda task: task.name)
def test_labelled_files_are_learned(tmp_path, task):
    """One pass over label<TAB>a<TAB>b as data/labelled.py reads it: what is planted is
    learned, shuffled labels are not."""
    steps, rows = 120, 32
    vocab = [*SPECIALS, "because", "but", "then", *(f"w{n}" for n in range(20))]
    tokenizer = WordPiece(vocab)
    sizes = dict(width=32, inner=64, vocab_size=len(vocab))
    arch = ARCH.but(dropout=0.0, attention_dropout=0.0, **sizes)
    params = fresh_params(arch, heads=task.heads)
    optim = Optim(name="adamw", lr=3e-3, warmup=10, decay=0.0, schedule="constant")
    optimizer = make_optimizer(optim, steps, params)
    step = quick_jit(make_train_step(Model(arch), task, optimizer))
    last = []
    for path in write_relations(tmp_path, steps * rows):
        data = read_labelled(path, tokenizer=tokenizer, length=14)
        assert data.labels == ("cause", "contrast", "time")
        task.check_labels(data.labels, arch)
        state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.uint32(0))
        means = []
        for number in range(steps):
            batch = data.batch(number, size=rows, seed=0)
            state, found = step(state, batch)
            means.append(found[f"{task.name}_accuracy"])
        last.append(float(sum(means[-20:-1], start=means[-1]).value))
    assert last[0] > 0.95
    assert last[1] < 1 / 3 + 0.1
