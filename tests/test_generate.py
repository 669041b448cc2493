"""Generation: the memory of keys and values, what is drawn, and whole texts."""

import contextlib
import dataclasses
import json
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
import transformers

import bert_jax
from bert_jax import generate as generation
from bert_jax.checkpoint import Checkpoints
from bert_jax.cli import main
from bert_jax.config import objective_fields
from bert_jax.convert.engine import to_theirs
from bert_jax.convert.hf import export_model
from bert_jax.convert.tables import LAYOUTS
from bert_jax.data.tokenizers import train_bpe
from bert_jax.errors import InputError
from bert_jax.generate import (
    CAUSAL,
    NOTHING,
    Form,
    Sampling,
    draw,
    generate,
    go_on,
    most_probable,
    nucleus,
    read,
    unfilled,
)
from bert_jax.models.arch import Arch
from bert_jax.models.model import Model
from bert_jax.models.tokens import after, plain, visible
from bert_jax.objectives.unilm import FORMS, in_form
from bert_jax.parity import OUTPUT, excess, their_model
from bert_jax.presets import preset
from tests import tiny
from tests.models.made import (
    GPT2,
    LONGFORMER,
    NEZHA,
    TINY,
    TRANSFORMER_XL,
    drawn_params,
    quick_jit,
    random_tokens,
)
from tests.test_cli import failure

BARE = dict(lm_head="bare", activation="gelu_tanh")
KINDS = {
    "gpt": dict(types=0, embed_norm="none", order="causal", **BARE),
    "gpt2": dict(**GPT2, **BARE),
    "gpt2 scanned": dict(**GPT2, **BARE, stack="scan"),
    "transformer-xl": dict(**TRANSFORMER_XL, lm_head="bias", max_distance=5),
    "nezha, causal": dict(**NEZHA, order="causal"),
    "unilm": dict(types=6),
}
PREFIX = Form("prefix", (4, 5), (4,))
PROMPTS = ([7, 30, 9], [11], [5, 6, 49, 17, 33, 20, 8])


def arch_of(kind: str) -> Arch:
    return TINY.but(**KINDS[kind])


def form_of(kind: str) -> Form:
    return PREFIX if kind == "unilm" else CAUSAL


@lru_cache
def params_of(kind: str) -> dict:
    return drawn_params(arch_of(kind), heads=("lm",))


@lru_cache
def reader(kind: str):
    model, blanks = Model(arch_of(kind)), len(form_of(kind).blanks)
    return quick_jit(
        lambda params, memory, tokens: read(
            model, params, memory, tokens, blanks=blanks
        )
    )


@lru_cache
def whole_reader(kind: str):
    model = Model(arch_of(kind))
    return quick_jit(
        lambda params, tokens, where: model.apply(
            {"params": params}, tokens, where=where, heads=("lm",)
        )["lm"][:, 0]
    )


def recomputed(kind: str, texts: list[list[int]], prefix: list[int], *, length: int):
    """The logits behind each text, which is read from its start, in a row of its own
    with padding on the right."""
    form, arch = form_of(kind), arch_of(kind)
    texts = [[*text, *form.blanks] for text in texts]
    ids = np.array([text + [0] * (length - len(text)) for text in texts])
    place, ends = np.arange(length), np.array([len(text) for text in texts])
    tokens = plain(
        ids,
        types=np.where(place < np.array(prefix)[:, None], *form.types),
        real=place < ends[:, None],
        order=form.order,
        prefix=np.array(prefix),
    )
    where = jnp.asarray(ends - 1)[:, None]
    logits = whole_reader(kind)(params_of(kind), tokens, where)
    return np.asarray(logits)[:, : arch.vocab_size]


# The memory.


@pytest.mark.parametrize("kind", KINDS)
def test_reading_on_is_reading_from_the_start(kind: str):
    """Rows of different lengths in one batch; the logits of eight pieces in turn."""
    arch, form, T, B = arch_of(kind), form_of(kind), 8, len(PROMPTS)
    V, prefix = arch.vocab_size, np.array([len(prompt) for prompt in PROMPTS])
    written = np.random.default_rng(0).integers(0, V, (B, T))
    want = recomputed(
        kind,
        [[*PROMPTS[b], *written[b, :t]] for b in range(B) for t in range(T)],
        [len(p) for p in PROMPTS for _ in range(T)],
        length=16,
    ).reshape(B, T, V)

    memory = unfilled(arch, rows=B, slots=7 + T - 1)
    params, step = params_of(kind), reader(kind)
    logits, memory = step(params, memory, form.given(PROMPTS, length=7))
    found = [logits]
    for t in range(1, T):
        start = jnp.asarray(prefix + t - 1)
        tokens = form.written(written[:, t - 1 : t], start=start, prefix=prefix)
        logits, memory = step(params, memory, tokens)
        found.append(logits)
    found = np.stack(found, 1)[..., :V]
    for t in range(T):
        assert excess(found[:, t], want[:, t], **OUTPUT) <= 1, t
    # The last token alone, with nothing to remember, has other things to say.
    blank = unfilled(arch, rows=B, slots=7 + T - 1)
    forgot = np.asarray(step(params, blank, tokens)[0])[:, :V]
    assert np.abs(forgot - want[:, -1]).max(-1).min() > 0.1
    # Every slot is filled now, but those of the shorter rows.
    filled = np.asarray(memory.tokens.group).sum(1)
    np.testing.assert_array_equal(filled, prefix + T - 1)


def test_unilm_is_asked_as_it_was_trained():
    """Types, and who sees whom, are those of a row of the objective's seq2seq form."""
    types = jnp.array([[0, 0, 0, 0, 1, 1, 1]])  # [CLS] a b [SEP] c d e
    places = jnp.arange(7)[None]
    row = in_form(jnp.array([FORMS.index("seq2seq")]), types, places)
    trained = plain(types, types=row["types"]).replace(rank=row["rank"])
    form, prefix = Form("prefix", generation.SEQ2SEQ), jnp.array([4])
    given = form.given([[2, 8, 9, 3]], length=4)
    written = form.written(np.array([[5, 6, 7]]), start=prefix, prefix=prefix)
    tokens = jax.tree.map(after, given, written)
    for name in ("types", "positions", "group"):
        np.testing.assert_array_equal(getattr(tokens, name), getattr(trained, name))
    np.testing.assert_array_equal(visible(tokens, tokens), visible(trained, trained))
    assert PREFIX.types == generation.SEQ2SEQ


def test_a_memory_with_too_few_slots_forgets_the_oldest():
    """One layer: what does not fit in is as if it had not been there."""
    arch = TINY.but(**TRANSFORMER_XL | dict(layers=1, lm_head="bias"))
    params, model = drawn_params(arch, heads=("lm",)), Model(arch)
    text = [5, 6, 49, 17, 33]
    first, last = ([text[:4]], [text[4:]])
    memory = unfilled(arch, rows=1, slots=2)
    short = plain(np.array([text[2:]]), order="causal")

    @quick_jit
    def both(params):
        _, filled = read(model, params, memory, CAUSAL.given(first, length=4))
        tokens = CAUSAL.written(np.array(last), start=jnp.array([4]), prefix=None)
        found, _ = read(model, params, filled, tokens)
        whole = model.apply({"params": params}, short, heads=("lm",))["lm"]
        return found, whole[:, -1]

    found, want = both(params)
    assert excess(found[:, :50], want[:, :50], **OUTPUT) <= 1


def test_a_window_has_no_memory():
    arch = TINY.but(**LONGFORMER)
    memory = unfilled(arch, rows=1, slots=2)
    with pytest.raises(InputError, match="a window has no place for keys and values"):
        Model(arch).apply(
            {"params": drawn_params(arch)}, random_tokens(arch, 1, 8), memory=memory
        )


# The loop.


def naive(kind: str, prompt: list[int], *, length: int, choose, stop: int):
    """One row, read from its start for every piece."""
    pieces, score = [], 0.0
    while len(pieces) < length and pieces[-1:] != [stop]:
        text = [*prompt, *pieces]
        (logits,) = recomputed(kind, [text], [len(prompt)], length=24)
        pieces.append(choose(logits, len(pieces)))
        score += float(jax.nn.log_softmax(logits)[pieces[-1]])
    return pieces + [NOTHING] * (length - len(pieces)), score


@pytest.mark.parametrize("kind", ["gpt2", "transformer-xl", "unilm"])
def test_the_loop_is_the_naive_one(kind: str):
    """The same keys, the same pieces; one of them ends its row, the others go on."""
    arch, params, form = arch_of(kind), params_of(kind), form_of(kind)
    sampling = Sampling(2.0, 40, 0.99)
    keys = jax.random.split(jax.random.key(3), len(PROMPTS))
    options = dict(length=10, form=form, sampling=sampling)
    free, _ = go_on(arch, params, PROMPTS, keys=keys, **options)
    assert (free != NOTHING).all()
    stop = next(
        int(row[t]) for t in range(2, 9) for row in free if row[t] not in row[:t]
    )
    pieces, scores = go_on(arch, params, PROMPTS, keys=keys, stop=stop, **options)
    lengths = (pieces != NOTHING).sum(1)
    assert lengths.min() < lengths.max()
    surplus = np.full(arch.padded_vocab - arch.vocab_size, -np.inf, np.float32)
    for n, prompt in enumerate(PROMPTS):

        def choose(logits, t, key=keys[n]):
            key = jax.random.fold_in(key, t)[None]
            return int(draw(np.append(logits, surplus)[None], key, sampling)[0])

        want, score = naive(kind, prompt, length=10, choose=choose, stop=stop)
        np.testing.assert_array_equal(pieces[n], want)
        assert scores[n] == pytest.approx(score, rel=1e-4)
    # A row among others, and a piece that is not allowed.
    others = ([8], PROMPTS[1], [9] * 6)
    among, _ = go_on(arch, params, others, keys=keys[jnp.array([2, 1, 0])], **options)
    np.testing.assert_array_equal(free[1], among[1])
    allowed = np.arange(arch.padded_vocab) != stop
    without, _ = go_on(arch, params, PROMPTS, keys=keys, allowed=allowed, **options)
    assert stop not in without


@pytest.mark.parametrize("name", ["gpt2", "openai-gpt"])
def test_greedy_is_what_transformers_generates(name: str):
    """Token for token, on weights far from where they start."""
    member = preset(name)
    small = dict(vocab_size=50, width=24, layers=2, heads=2, inner=96, max_positions=40)
    arch = member.arch.but(vocab_multiple=8, **small)
    params = drawn_params(arch, heads=("lm",), seed=2)
    layout = LAYOUTS[member.layout]
    tensors, _ = to_theirs(params, arch, layout, heads=("lm",))
    theirs = their_model(arch, layout, ("lm",), tensors)
    pieces, _ = go_on(arch, params, PROMPTS, length=30)
    for prompt, row in zip(PROMPTS, pieces, strict=True):
        ids = torch.tensor([prompt])
        options = dict(attention_mask=torch.ones_like(ids), pad_token_id=0)
        want = theirs.generate(
            ids, do_sample=False, max_new_tokens=30, eos_token_id=None, **options
        )
        np.testing.assert_array_equal(row, want[0, len(prompt) :].numpy())
    assert len(np.unique(pieces)) > 5  # it does not say one thing again and again


# What is drawn.


def cut_by_hand(logits: np.ndarray, temperature=1.0, top_k=None, top_p=None):
    """The probabilities, piece by piece from the largest on."""
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = [i for i in order if top_k is None or p[i] >= p[order[top_k - 1]]]
    p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    p /= p.sum()
    if top_p is not None:
        number = next(n for n in range(1, len(p) + 1) if p[kept[:n]].sum() >= top_p)
        p = np.where(p >= p[kept[number - 1]], p, 0)
    return p / p.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 4, 20])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.6, 0.999])
def test_cuts(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(0, 2, (5, 20)).astype(np.float32)
    found = jax.nn.softmax(Sampling(temperature, top_k, top_p).cut(logits))
    want = [cut_by_hand(row, temperature, top_k, top_p) for row in logits]
    np.testing.assert_allclose(found, want, atol=1e-6)


def test_cuts_where_pieces_are_equal():
    """None of the equal ones is preferred, and -inf is nothing."""
    logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.1, 0.1, 0.0]]))
    kept = lambda cut: np.flatnonzero(np.isfinite(cut[0])).tolist()  # noqa: E731
    assert kept(most_probable(logits, 2)) == [0, 1, 2]
    assert kept(most_probable(logits, 5)) == [0, 1, 2, 3, 4]
    assert kept(nucleus(logits, 0.39)) == [0]
    assert kept(nucleus(logits, 0.5)) == [0, 1, 2]
    assert kept(nucleus(logits, 1.0)) == [0, 1, 2, 3, 4]


def test_the_cuts_are_those_of_transformers():
    logits = np.random.default_rng(1).normal(0, 3, (4, 50)).astype(np.float32)
    theirs = torch.tensor(logits)
    for warper, ours in (
        (transformers.TopKLogitsWarper(top_k=7), most_probable(logits, 7)),
        (transformers.TopPLogitsWarper(top_p=0.8), nucleus(logits, 0.8)),
        (transformers.TemperatureLogitsWarper(0.7), Sampling(0.7).cut(logits)),
    ):
        np.testing.assert_allclose(ours, warper(None, theirs), rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [dict(temperature=0.6), dict(temperature=1.4, top_k=6), dict(top_p=0.85)],
    ids=str,
)
def test_pieces_come_as_often_as_they_should(settings):
    """Of 20,000 draws: chi-squared does not reject them at 0.1 %, but does reject a
    temperature that is a tenth higher."""
    rows = 20_000
    logits = np.random.default_rng(4).normal(0, 2, 30).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), rows)
    given = jnp.broadcast_to(logits, (rows, 30))
    pieces = jax.jit(draw, static_argnums=2)(given, keys, Sampling(**settings))
    counts = np.bincount(pieces, minlength=30)

    def p_value(**settings) -> float:
        want = cut_by_hand(logits, **settings) * rows
        often = want >= 5
        seen, expected = (
            [*x[often], x[~often].sum()] if x[~often].sum() else x[often]
            for x in (counts, want)
        )
        return scipy.stats.chisquare(seen, expected).pvalue

    assert not counts[cut_by_hand(logits, **settings) == 0].any()
    assert p_value(**settings) > 1e-3
    warmer = settings | {"temperature": 1.1 * settings.get("temperature", 1.0)}
    assert p_value(**warmer) < 1e-3


# Texts.


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A directory with a small GPT-2 and a vocabulary of bytes."""
    texts = ["the cat likes the red house\nand the sea " * 9]
    tokenizer = train_bpe(texts, vocab_size=280, style="gpt2", progress=False)
    small = dict(width=24, layers=2, heads=2, inner=96, max_positions=40)
    arch = preset("gpt2").arch.but(vocab_size=280, vocab_multiple=8, **small)
    path = tmp_path_factory.mktemp("models") / "gpt2"
    params = drawn_params(arch, heads=("lm",), seed=1)
    export_model(path, params, arch, tokenizer, layout="gpt2")
    return path


@pytest.fixture(scope="module")
def unilm(tmp_path_factory, tiny_tokenizer):
    small = dict(width=24, layers=2, heads=2, inner=40, max_positions=40)
    arch = preset("unilm-base-cased").arch.but(vocab_size=100, **small)
    params = drawn_params(arch, heads=("lm",), seed=1)
    path = tmp_path_factory.mktemp("models") / "unilm"
    export_model(path, params, arch, tiny_tokenizer)
    return path


def test_a_text_goes_on(gpt2, capsys):
    model = bert_jax.load(gpt2)
    tokenizer, prompt = model.tokenizer, "the cat"
    options = dict(length=12, count=3, temperature=0.9, top_k=50, seed=5)
    found = model.generate([prompt, "a house"], **options)
    assert [one["prompt"] for one in found] == [prompt] * 3 + ["a house"] * 3
    assert len({one["text"] for one in found}) == 6
    for one in found:
        # The text stands behind the prompt; no special piece was drawn.
        ids = tokenizer.encode(one["prompt"]) + one["ids"]
        assert one["prompt"] + one["text"] == tokenizer.decode(ids)
        assert not set(one["ids"]) & set(tokenizer.special_ids)
        # By the logits of the whole text, at temperature 1.
        logits = model([ids])["logits"][0, -1 - len(one["ids"]) : -1]
        told = jax.nn.log_softmax(logits)[np.arange(len(one["ids"])), one["ids"]]
        assert not one["ended"]
        assert one["log_probability"] == pytest.approx(float(told.sum()), rel=1e-4)
    # Each sample has its own draws, whatever else is asked for; another seed, others.
    again = model.generate([prompt, "the sea"], **options)
    assert again[:3] == found[:3]
    assert model.generate([prompt] * 2, **options | dict(seed=6))[:3] != found[:3]

    # The same as a person types it.
    words = ["--length", "12", "--count", "3", "--temperature", "0.9"]
    words = [
        "generate",
        str(gpt2),
        prompt,
        "a house",
        *words,
        "--top_k",
        "50",
        "--seed",
        "5",
    ]
    main([*words, "--json"])
    assert json.loads(capsys.readouterr().out) == found
    main(words)
    whole = [one["prompt"] + one["text"] for one in found]
    shown = [f"--- {n}\n{text}\n" for n, text in enumerate(whole, 1)]
    assert capsys.readouterr().out == "".join(shown)


def test_another_text_is_written(unilm, capsys):
    """UniLM's greedy answer is that of `naive`, with types 4 and 5; [SEP] ends it. Its
    probability is by the model as it is: of pieces that are barred, too."""
    model = bert_jax.load(unilm)
    tokenizer, text = model.tokenizer, "the cat likes a red house"
    (one,) = model.generate(text, length=8)
    source = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    barred = [i for i in tokenizer.special_ids if i != tokenizer.sep_id]
    net = quick_jit(
        lambda tokens, where: Model(model.arch).apply(
            {"params": model.params}, tokens, where=where, heads=("lm",)
        )["lm"][0, 0, :100]
    )
    written, told, without = [], 0.0, 0.0
    while len(written) < 8:
        ids = [*source, *written, tokenizer.mask_id]
        ids += [0] * (32 - len(ids))
        place, end = np.arange(32)[None], len(source) + len(written)
        tokens = plain(
            [ids],
            types=np.where(place < len(source), 4, 5),
            real=place <= end,
            order="prefix",
            prefix=[len(source)],
        )
        logits = np.array(net(tokens, jnp.array([[end]])))
        bare = jax.nn.log_softmax(logits)
        logits[barred] = -np.inf
        piece = int(logits.argmax())
        told += float(bare[piece])
        without += float(jax.nn.log_softmax(logits)[piece])
        if piece == tokenizer.sep_id:
            break
        written.append(piece)
    assert one["ids"] == written
    assert one["log_probability"] == pytest.approx(told, rel=1e-4)
    assert without > told + 0.01  # what is barred has a share of its own
    assert one["text"] == tokenizer.decode(written)
    main(["generate", str(unilm), text, "--length", "8"])
    assert capsys.readouterr().out == one["text"] + "\n"


def a_causal_run(corpus, rows: str, folder, monkeypatch):
    """A BERT that was trained by causal_lm on such rows, as it is loaded."""
    settings = dict(objective__name="causal_lm", rows=rows, arch__vocab_size=100)
    run = tiny.make_run(corpus, **settings)
    about = {"config": run.as_dict(), "heads": ["lm"]}
    about["corpus"] = {"content": "", "tokenizer": {"hash": ""}}
    (folder / "run.json").write_text(json.dumps(about))
    corpus.tokenizer.save(folder / "tokenizer")
    params = drawn_params(run.arch, heads=("lm",))
    monkeypatch.setattr(Checkpoints, "good_params", lambda *_: (6, params))
    return bert_jax.load(folder)


def test_a_run_writes_as_it_was_trained(tiny_corpus, tmp_path, monkeypatch):
    """A BERT that was trained by causal_lm goes on; backwards, it could not."""
    model = a_causal_run(tiny_corpus, "stream", tmp_path, monkeypatch)
    assert (model.arch.order, model.preset.name) == ("all", "bert-tiny")
    assert generation.form_of(model) == CAUSAL
    (one,) = model.generate("the cat", length=4)
    assert one["ids"]
    assert not set(one["ids"]) & set(model.tokenizer.special_ids)
    backward = dataclasses.replace(model.preset, hyper={"direction": "backward"})
    with pytest.raises(InputError, match="trained from right to left: it cannot go on"):
        dataclasses.replace(model, preset=backward).generate("the cat")


@pytest.mark.parametrize("rows", ["full", "stream"])
def test_a_text_begins_as_rows_did(rows, tiny_corpus, tmp_path, monkeypatch):
    """Rows of a stream have no [CLS]; all others begin with one."""
    model = a_causal_run(tiny_corpus, rows, tmp_path, monkeypatch)
    tokenizer = model.tokenizer
    text = tokenizer.encode("the cat")
    chances = {}
    for first in ("full", "stream"):
        ids = [tokenizer.cls_id, *text] if first == "full" else text
        asked = plain(np.asarray([ids]), order="causal")
        out = Model(model.arch).apply({"params": model.params}, asked, heads=("lm",))
        chances[first] = jax.nn.log_softmax(out["lm"][0, -1])
    (one,) = model.generate("the cat", length=1)
    (piece,) = one["ids"] or [tokenizer.sep_id]
    assert one["log_probability"] == pytest.approx(float(chances[rows][piece]), 1e-4)
    assert abs(chances["full"] - chances["stream"])[piece] > 0.01


@pytest.mark.parametrize("name", ["gpt2", "unilm-base-cased"])
def test_what_a_run_was_trained_by_counts(name, tiny_corpus, tmp_path, monkeypatch):
    """Not what its preset is known for: by masked_lm no member learns to write."""
    member = preset(name)
    arch = member.arch.but(vocab_size=100)
    config = tiny.make_run(tiny_corpus).as_dict() | {"preset": name}
    config["arch"] = dataclasses.asdict(arch)
    monkeypatch.setattr(Checkpoints, "good_params", lambda *_: (6, {"lm": {}}))
    tiny_corpus.tokenizer.save(tmp_path / "tokenizer")

    def trained_by(objective: str):
        corpus = {"content": "", "tokenizer": {"hash": ""}}
        its = config | {"objective": objective_fields(objective)}
        about = {"config": its, "heads": ["lm"], "corpus": corpus}
        (tmp_path / "run.json").write_text(json.dumps(about))
        return bert_jax.load(tmp_path)

    form = generation.form_of(trained_by(member.objective))
    assert form.order == ("prefix" if member.objective == "unilm" else "causal")
    with pytest.raises(InputError, match="that learned to read texts from both sides"):
        trained_by("masked_lm").generate("the cat")


def test_errors(gpt2, tmp_path, tiny_tokenizer):
    assert "MODEL nothing does not exist" in failure("generate", "nothing", "a cat")
    told = failure(
        *("generate", gpt2, "a cat", "--temperature", "0", "--top_p", "1.5"),
        *("--top_k", "281", "--length", "0", "--count", "0", "--seed", "-1"),
    )
    for text in (
        "temperature=0.0 must be more than 0; leave it out for greedy",
        "top_p=1.5 must be more than 0 and at most 1",
        "top_k=281 must be in 1..280",
        "length=0 must be at least 1",
        "count=0 must be at least 1",
        "seed=-1 must be in 0..4294967295",
    ):
        assert text in told
    assert "top_p=nan must be" in failure("generate", gpt2, "a cat", "--top_p", "nan")
    assert "all texts would be the same" in failure(
        "generate", gpt2, "a cat", "--count", "2"
    )
    assert "the text '' is empty" in failure("generate", gpt2, "a cat", "")
    told = failure("generate", gpt2, "a cat", "--length", "40")
    assert "length=40 more are too many: the model has positions for 40" in told
    with pytest.raises(InputError, match="no text is given"):
        generate(bert_jax.load(gpt2), [])

    arch = TINY.but(vocab_size=100)
    export_model(
        tmp_path / "bert", drawn_params(arch, heads=("lm",)), arch, tiny_tokenizer
    )
    told = failure("generate", tmp_path / "bert", "a cat")
    assert "is a bert that learned to read texts from both sides" in told
    for name in ("gpt2-xl", "openai-gpt", "transfo-xl-wt103", "unilm-base-cased"):
        assert name in told
    assert "bert-base" not in told
    # UniLM without its head.
    body = arch.but(types=6)
    export_model(tmp_path / "body", drawn_params(body), body, tiny_tokenizer)
    told = failure("generate", tmp_path / "body", "a cat")
    assert "has no language-model head: it cannot write" in told


@pytest.mark.parametrize("name", ["gpt2", "unilm"])
def test_as_much_as_there_is_room_for(name: str, request, monkeypatch):
    """The last position is used, and no more."""
    model = bert_jax.load(request.getfixturevalue(name))
    places = []

    def look(arch, params, prompts, *, length, form, **_):
        start = jnp.array([len(prompts[0]) + length - 2])  # of the last piece read
        last = form.written(np.array([[5]]), start=start, prefix=start)
        places.append(int(last.positions.max()))
        return np.zeros((1, length), int), np.zeros(1)

    monkeypatch.setattr(generation, "go_on", look)
    for length in range(20, 40):
        with contextlib.suppress(InputError):
            model.generate("the cat likes the sea", length=length)
    assert max(places) == 39
