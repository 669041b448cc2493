"""BPE of words (GPT): ids, files, rows and a step of training with it; and the words
of Transformer-XL, which are refused."""

import json
import pickle

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

import bert_jax
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import Rows
from bert_jax.data.tokenizers import SPECIALS, WordBPE, WordPiece, load_tokenizer
from bert_jax.data.tokenizers.word_bpe import NEW_LINE, SUFFIX
from bert_jax.errors import InputError
from bert_jax.train import train
from tests.data.test_tokenizers_kinds import corpora
from tests.test_train import family_run

TEXTS = [
    "the lower the slower the slowest the lowest: low, lower, lowest, slow, slower.",
    "don't we'll they've it's I'm 123 4567 naïve café 北京 CAFÉ\n\n tabs\tand spaces ",
]


def write_bare(folder, texts=TEXTS, vocab_size=90, also=()):
    """vocab.json and merges.txt of a trained vocabulary, as released."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", *also],
        end_of_word_suffix=SUFFIX,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    backend.model.save(str(folder))


def make_bare(folder, *words, **options):
    """The same beside the config.json of a model."""
    write_bare(folder, *words, **options)
    (folder / "config.json").write_text('{"model_type": "openai-gpt"}')
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return make_bare(tmp_path_factory.mktemp("gpt"))


@pytest.fixture
def small(bare):
    return load_tokenizer(bare)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def pieces_of(tokenizer, text):
    return [tokenizer.vocab[i] for i in tokenizer.encode(text)]


def check_parity(tokenizer, reference, texts):
    ours = tokenizer.encode_batch(texts)
    theirs = reference(texts)["input_ids"]
    fast = [ids.tolist() for ids in tokenizer.encode_fast(texts)]
    placed = [ids for ids, _ in tokenizer.encode_offsets_batch(texts)]
    rows = zip(texts, theirs, ours, fast, placed, strict=True)
    wrong = [row for row in rows if not row[1] == row[2] == row[3] == row[4]]
    assert not wrong, f"{len(wrong)} texts differ, first {wrong[:2]!r}"


def test_by_hand():
    vocab = ["<unk>", *"lowest", f"t{SUFFIX}", f"w{SUFFIX}", "lo", f"low{SUFFIX}", "es"]
    vocab += [f"est{SUFFIX}", f",{SUFFIX}"]
    merges = [("l", "o"), ("lo", f"w{SUFFIX}"), ("e", "s"), ("es", f"t{SUFFIX}")]
    tokenizer = WordBPE(vocab, merges)
    pieces = pieces_of(tokenizer, "Lówest,low x")
    assert pieces == ["lo", "w", "est</w>", ",</w>", "low</w>", "<unk>"]
    assert pieces_of(tokenizer, "lo") == ["l", "<unk>"]  # no o that ends a word
    assert tokenizer.decode(tokenizer.encode("Lowest, LOW")) == "lowest , low"
    ids, places = tokenizer.encode_offsets(" LÓWest,")
    assert ids == tokenizer.encode("lowest,")
    assert places == [(1, 3), (3, 4), (4, 7), (7, 8)]


def test_fuzz(small, bare, fuzz):
    check_parity(small, transformers.AutoTokenizer.from_pretrained(bare), fuzz)


def test_real(shared_data, tmp_path):
    texts = corpora.english(shared_data)
    folder = make_bare(tmp_path / "gpt", texts, 4000)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.size == 4000
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(reference, transformers.OpenAIGPTTokenizer)
    check_parity(tokenizer, reference, texts)


def test_what_it_is(small):
    assert (small.kind, small.style, small.joint) == ("bpe", "openai-gpt", "")
    names = ("pad_id", "cls_id", "mask_id", "unk_id", "sep_id")
    assert [getattr(small, name) for name in names] == [None, None, None, 0, 0]
    assert small.special_ids == (0,)
    assert small.wrap([3, 4]) == ([3, 4], [0, 0])
    assert small.encode("a<unk>b", specials="parse") == [
        *small.encode("a"),
        0,
        *small.encode("b"),
    ]
    again = pickle.loads(pickle.dumps(small))
    assert again.hash == small.hash
    assert again.encode_batch(TEXTS) == small.encode_batch(TEXTS)


def test_what_ends_a_text(tmp_path, fuzz):
    """The new line of the released vocabulary, which no text gives."""
    tokenizer = load_tokenizer(make_bare(tmp_path, also=[NEW_LINE]))
    assert tokenizer.vocab[tokenizer.sep_id] == NEW_LINE
    assert tokenizer.special_ids == (0, tokenizer.sep_id)
    assert not any(tokenizer.sep_id in ids for ids in tokenizer.encode_batch(fuzz))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    check_parity(tokenizer, reference, [*fuzz, f"a{NEW_LINE}b"])


def test_words(small):
    text = "the evae, taebst 7567"
    ids = small.encode(text)
    assert len(ids) > 5
    assert small.unk_id not in ids
    numbers = small.word_numbers(ids)
    assert numbers.dtype == np.int32
    by_hand, number = [], 0
    for piece in pieces_of(small, text):
        by_hand.append(number)
        number += piece.endswith(SUFFIX)
    assert numbers.tolist() == by_hand
    assert by_hand[-1] == 4  # the comma is a word
    assert small.word_numbers([ids[1:], ids[:-1]])[0].tolist() == [
        n - 1 for n in by_hand[1:]
    ]
    part, end, unknown = small.encode("lo☃")[0], small.encode("the")[-1], small.unk_id
    numbers = small.word_numbers([part, unknown, part, end, part])
    assert numbers.tolist() == [0, 1, 2, 2, 3]
    assert small.word_numbers([]).tolist() == []
    assert small.starts.all()


def test_hash(small):
    vocab, merges = small.vocab, small.merges
    assert WordBPE(vocab, merges).hash == small.hash
    others = [
        WordBPE([*vocab[:-2], vocab[-1], vocab[-2]], merges),
        WordBPE([*vocab, "new"], merges),
        WordBPE(vocab, merges[:-1]),
        WordBPE(vocab, [merges[1], merges[0], *merges[2:]]),
    ]
    assert len({small.hash, *(other.hash for other in others)}) == 5


@pytest.mark.parametrize("with_config", [True, False])
def test_round_trip(tmp_path, small, fuzz, with_config):
    sample = [*fuzz[::20], *TEXTS]
    ids = small.encode_batch(sample)
    removed = ([], ["tokenizer.json"], ["vocab.json", "merges.txt"])
    for number, missing in enumerate(removed):
        folder = tmp_path / str(number)
        small.save(folder)
        if with_config:
            (folder / "config.json").write_text('{"model_type": "openai-gpt"}')
        for name in missing:
            (folder / name).unlink()
        again = load_tokenizer(folder)
        assert (again.hash, again.style) == (small.hash, small.style)
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        assert isinstance(reference, transformers.OpenAIGPTTokenizer)
        assert len(reference) == small.size
        assert reference.special_tokens_map == {"unk_token": "<unk>"}
        assert reference(sample)["input_ids"] == ids
        assert reference.decode(ids[-1]) == small.decode(ids[-1])
        marked = "low <unk> slower"
        assert reference(marked)["input_ids"] == small.encode(marked, specials="parse")


@pytest.mark.parametrize("with_config", [True, False])
def test_loads_what_transformers_saves(tmp_path, small, bare, with_config):
    transformers.AutoTokenizer.from_pretrained(bare).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    if not with_config:  # tokenizer.json alone says what it is
        (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).hash == small.hash


def test_style_is_found(tmp_path, small, bare):
    """By the pieces, where no config tells; not if they may be XLM's."""
    assert load_tokenizer(bare / "vocab.json").hash == small.hash
    folder = make_bare(tmp_path, also=["<s>"])
    assert load_tokenizer(folder).style == "openai-gpt"
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"style=roberta \| gpt2 \| openai-gpt"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, style="openai-gpt").style == "openai-gpt"
    with pytest.raises(InputError, match="unknown style of a bpe tokenizer 't5'"):
        load_tokenizer(folder, style="t5")


def test_file_errors(tmp_path, small):
    small.save(tmp_path)
    with pytest.raises(InputError, match=r"lower-cases the text and .*; lowercase can"):
        load_tokenizer(tmp_path, lowercase=False)
    with pytest.raises(InputError, match="is no roberta vocabulary: no pieces: <s>"):
        load_tokenizer(tmp_path, style="roberta")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "merges.txt").write_text("#version: 0.2\nxq qx\n")
    with pytest.raises(InputError, match="merges of pieces it does not have: xq qx"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    text = "is no openai-gpt vocabulary: no pieces: <unk>, that end in </w>"
    with pytest.raises(InputError, match=text):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["normalizer"].update(lowercase=False, strip_accents=False),
            r"is not GPT's BPE: normalizer.strip_accents is False \(valid: None\); "
            r"normalizer.lowercase is False \(valid: True\)",
        ),
        (
            lambda c: c.update(pre_tokenizer={"type": "WhitespaceSplit"}),
            r"pre_tokenizer.type is 'WhitespaceSplit' \(valid: 'BertPreTokenizer'\)",
        ),
        (lambda c: c["model"].update(fuse_unk=True), "model.fuse_unk is True"),
        (
            lambda c: c["model"].update(end_of_word_suffix="@"),
            "is not byte-level BPE: .*model.end_of_word_suffix is '@'",
        ),
        (
            lambda c: c["added_tokens"].append(
                c["added_tokens"][0] | {"id": 90, "content": "<new>"}
            ),
            "added tokens are not supported: <new>; give",
        ),
    ],
)
def test_foreign_tokenizer_json(tmp_path, small, change, message):
    small.save(tmp_path)
    edit_json(tmp_path / "tokenizer.json", change)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)


def prepare_books(folder, tokenizer, **options):
    text = "".join(f"{line}\n\n" for line in TEXTS * 40)
    (folder / "books.txt").write_text(text)
    return prepare(
        [str(folder / "books.txt")],
        tokenizer=tokenizer,
        out=folder / "data",
        workers=0,
        progress=False,
        **options,
    )


def test_rows(tmp_path, small):
    """Documents one after the other, with what ends them; [CLS] there is none."""
    corpus = prepare_books(tmp_path, small, sentences="line")
    assert corpus.tokenizer.hash == small.hash
    rows = Rows(corpus, "stream", 32, "attend", seed=0)
    batch = rows.build([0, 1, 2], [rows.read(n, n + 1) for n in range(3)], 3)
    first, second = TEXTS[0], TEXTS[1].split("\n")
    encoded = [small.encode(text) for text in (first, second[0], second[2])]
    stream = [i for ids in encoded for i in (*ids, small.sep_id)]
    assert batch["ids"].reshape(-1)[: len(stream)].tolist() == stream[:96]
    with pytest.raises(InputError, match="full begin with .CLS., for which the bpe"):
        Rows(corpus, "full", 32, "attend", seed=0)


def test_stored_words(tmp_path, small):
    """words=spaces stores where they begin, which no piece shows."""
    corpus = prepare_books(tmp_path, small, sentences="line", words="spaces")
    rows = Rows(corpus, "stream", 32, "attend", seed=0)
    batch = rows.build([0], [rows.read(0, 1)], 1)
    words = TEXTS[0].split()
    sizes = [len(small.encode(word)) for word in words]
    wanted = np.repeat(np.arange(1, len(words) + 1), sizes)
    assert max(sizes) > 1
    assert batch["words"][0][: len(wanted)].tolist() == wanted[:32].tolist()


def test_training(tmp_path, small):
    corpus = prepare_books(tmp_path, small)
    run = family_run(corpus, "openai-gpt", rows="stream", steps=2, optim__lr=1e-3)
    train(run, tmp_path / "run", progress=False)
    model = bert_jax.load(tmp_path / "run")
    assert model.arch.vocab_size == small.size
    assert model.tokenizer.hash == small.hash
    ids = model.tokenizer.encode(TEXTS[0])[:10]
    assert np.isfinite(model([ids])["logits"]).all()


@pytest.mark.parametrize("file", ["vocab.pkl", "vocab.txt"])
@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json"])
def test_words_of_transformer_xl(tmp_path, file, config):
    name = {"model_type": "transfo-xl", "tokenizer_class": "TransfoXLTokenizer"}
    (tmp_path / config).write_text(json.dumps(name))
    (tmp_path / file).write_bytes(b"<eos>\nthe\n,\n")
    text = f"{file} is Transformer-XL's own vocabulary of words, which is not read .nor"
    with pytest.raises(InputError, match=f"{text} is a pickle ever run.; prepare the"):
        load_tokenizer(tmp_path)
    # One that it was given instead is read, from its bare file too.
    given = WordPiece([*SPECIALS, "the"])
    given.save(tmp_path)
    assert load_tokenizer(tmp_path).hash == given.hash
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path).hash == given.hash
