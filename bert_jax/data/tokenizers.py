"""Text to ids and back: train, load, save and apply a BERT WordPiece vocabulary.

Text is normalised, cut into words at spaces and punctuation, and every word is matched
greedily, longest piece first, where a piece inside a word carries the prefix `##`.
BERT (https://arxiv.org/abs/1810.04805), WordPiece (https://arxiv.org/abs/1609.08144).
The work is done by the Rust library `tokenizers`, which also backs transformers.

Differs from the release (google-research/bert) as that library does: words of more than
100 characters are [UNK] (release: 200), private-use characters are dropped, the sigma
at the end of a Greek word is lower-cased as any other, U+2B820 to U+2B91F do not stand
alone, and characters younger than Unicode 8 have no category. Accents can be stripped
without lower-casing and the other way round. No trainer was released: pieces are merged
by frequency, as in BPE.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import WordPieceTrainer

from bert_jax.errors import InputError, unknown

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PREFIX = "##"
# What a tokenizer.json must say for its ids to be ours.
WORDPIECE_SETTINGS = {
    "normalizer.type": "BertNormalizer",
    "normalizer.clean_text": True,
    "pre_tokenizer.type": "BertPreTokenizer",
    "model.unk_token": "[UNK]",
    "model.continuing_subword_prefix": PREFIX,
    "model.max_input_chars_per_word": 100,
}


class Tokenizer:
    """A vocabulary, the switches of its normalisation, and what follows from both.

    `vocab` lists the pieces by id, `starts` [V] is True where a piece begins a word,
    and `hash` stands for everything that determines ids.
    """

    kind = "wordpiece"

    def __init__(
        self,
        vocab: Sequence[str],
        *,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        split_chinese: bool = True,
        where: str = "the vocabulary",
    ):
        """`strip_accents` None means as `lowercase`; errors name `where`."""
        _check_vocab(vocab, where=where)
        self.vocab = list(vocab)
        self.lowercase = lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        self.split_chinese = split_chinese
        self.starts = np.array([not piece.startswith(PREFIX) for piece in vocab])
        ids = [self.vocab.index(piece) for piece in SPECIALS]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = ids
        self.special_ids = tuple(sorted(ids))
        switches = [self.lowercase, self.strip_accents, self.split_chinese]
        content = json.dumps([self.kind, switches, self.vocab])
        self.hash = hashlib.sha256(content.encode()).hexdigest()[:16]
        # Two backends, as the library's own switch is a mutable flag of the whole
        # object: one thread could then change what another one encodes.
        self._text = self._backend()
        self._parse = self._backend()
        self._parse.add_special_tokens(list(SPECIALS))

    @property
    def size(self) -> int:
        return len(self.vocab)

    def encode(
        self, text: str, *, specials: Literal["text", "parse"] = "text"
    ) -> list[int]:
        """Ids of a text, nothing added at its ends.

        With "text" a "[MASK]" in the text is characters like any others; with "parse"
        it is the special token.
        """
        backends = {"text": self._text, "parse": self._parse}
        if specials not in backends:
            raise InputError(unknown("specials", specials, backends))
        return backends[specials].encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` with specials="text", for many texts, on all cores."""
        batch = self._text.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """As `encode` with specials="text", with each piece's place text[start:end]."""
        encoding = self._text.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens included, as transformers spaces it."""
        return self._parse.decode([int(i) for i in ids], skip_special_tokens=False)

    def word_numbers(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The number of each piece's word, from 0: [..., S] -> int32 [..., S].

        A row cut inside a word begins with a ## piece: that too is word 0.
        """
        numbers = np.cumsum(self.starts[np.asarray(ids, int)], axis=-1, dtype=np.int32)
        return numbers - numbers[..., :1]

    def save(self, path: str | os.PathLike) -> None:
        """Write the files from which transformers and `load_tokenizer` get the same."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{piece}\n" for piece in self.vocab)
        (path / "vocab.txt").write_text(lines, encoding="utf-8")
        self._parse.save(str(path / "tokenizer.json"))
        # transformers takes the switches from here, not from tokenizer.json.
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.split_chinese,
            **{f"{piece[1:-1].lower()}_token": piece for piece in SPECIALS},
        }
        text = json.dumps(config, indent=2) + "\n"
        (path / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def _backend(self) -> tokenizers.Tokenizer:
        model = models.WordPiece(
            {piece: i for i, piece in enumerate(self.vocab)},
            unk_token="[UNK]",
            max_input_chars_per_word=100,
        )
        backend = tokenizers.Tokenizer(model)
        backend.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=self.split_chinese,
            strip_accents=self.strip_accents,
            lowercase=self.lowercase,
        )
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix=PREFIX)
        # Unused here, where rows are built later; the saved file is to be complete.
        backend.post_processor = processors.BertProcessing(
            ("[SEP]", self.sep_id), ("[CLS]", self.cls_id)
        )
        return backend


def train_wordpiece(
    texts: Iterable[str],
    *,
    vocab_size: int,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    progress: bool = True,
) -> Tokenizer:
    """Learn a vocabulary of exactly `vocab_size` pieces; equal texts, equal result.

    Its order: the special tokens, the characters, the ## characters, the merges.
    """
    blank = Tokenizer(SPECIALS, lowercase=lowercase, strip_accents=strip_accents)
    counts, alphabet = _count_words(texts, blank=blank._text, progress=progress)
    if not counts:
        raise InputError("the training text is empty; give at least one word")
    smallest = len(SPECIALS) + len(alphabet)
    if vocab_size < smallest:
        raise InputError(
            f"vocab_size={vocab_size} is too small: the text has an alphabet of "
            f"{len(alphabet)} pieces (characters, and characters inside words); with "
            f"{len(SPECIALS)} special tokens that makes at least {smallest}"
        )
    # The library numbers the ## characters in the order of a randomly seeded hash map,
    # and ties between merges go by number (github.com/huggingface/tokenizers, issue
    # 1794). Declared beforehand, every piece of the alphabet has a fixed number.
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *alphabet],
        show_progress=progress,
    )
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.train_from_iterator(_repeat_words(counts), trainer)
    ids = backend.get_vocab()
    if len(ids) < vocab_size:
        raise InputError(
            f"vocab_size={vocab_size} is too large: only {len(ids)} pieces can be made "
            f"from the text; lower vocab_size or give more text"
        )
    return Tokenizer(
        sorted(ids, key=ids.get), lowercase=lowercase, strip_accents=strip_accents
    )


def load_tokenizer(
    path: str | os.PathLike,
    *,
    lowercase: bool | None = None,
    strip_accents: bool | None = None,
) -> Tokenizer:
    """Read a directory with tokenizer.json or vocab.txt, or a .txt vocabulary itself.

    Of the switches an argument counts first, then tokenizer_config.json, then
    tokenizer.json, then the default of transformers: uncased.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a directory or a vocab.txt")
    switches = {"lowercase": True, "strip_accents": None, "split_chinese": True}
    if path.is_dir():
        source, config = _find_files(path)
    elif path.suffix == ".txt":
        source, config = path, {}
    else:
        raise InputError(
            f"{path} is neither a directory nor a .txt vocabulary; give the directory "
            f"that holds tokenizer.json or vocab.txt"
        )
    if source.suffix == ".json":
        vocab, described = _read_tokenizer_json(source)
        switches |= described
    else:
        vocab = _read_vocab(source)
    switches |= config
    arguments = {"lowercase": lowercase, "strip_accents": strip_accents}
    switches |= {name: value for name, value in arguments.items() if value is not None}
    return Tokenizer(vocab, where=str(source), **switches)


def _check_vocab(vocab: Sequence[str], *, where: str) -> None:
    twice = [repr(piece) for piece, n in Counter(vocab).items() if n > 1]
    if twice:
        shown = ", ".join(twice[:10]) + (", ..." if len(twice) > 10 else "")
        raise InputError(
            f"{where}: {len(twice)} pieces occur more than once: {shown}; every piece "
            f"has one id, so remove the copies"
        )
    missing = [piece for piece in SPECIALS if piece not in vocab]
    if missing:
        raise InputError(
            f"{where}: no special tokens {', '.join(missing)}; a WordPiece vocabulary "
            f"needs {', '.join(SPECIALS)}"
        )


def _count_words(
    texts: Iterable[str], *, blank: tokenizers.Tokenizer, progress: bool
) -> tuple[dict[str, int], list[str]]:
    """Occurrences of every normalised word, and the sorted pieces of one character."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = blank.normalizer
    backend.pre_tokenizer = blank.pre_tokenizer
    # Without room for merges, training is counting; the trainer's state has the counts.
    trainer = WordPieceTrainer(vocab_size=0, show_progress=progress)
    backend.train_from_iterator(texts, trainer)
    state = json.loads(trainer.__getstate__())
    counts = state["WordPieceTrainer"]["bpe_trainer"]["words"]
    # By length first: single characters before their ## forms.
    return counts, sorted(backend.get_vocab(), key=lambda piece: (len(piece), piece))


def _repeat_words(counts: Mapping[str, int]) -> Iterator[str]:
    """The counted words as text again, for a trainer takes nothing but text."""
    most = 10_000
    for word, count in counts.items():
        for done in range(0, count, most):
            yield f"{word} " * min(most, count - done)


def _find_files(folder: Path) -> tuple[Path, dict[str, bool | None]]:
    """The file with the vocabulary, and the switches of tokenizer_config.json."""
    names = ("tokenizer.json", "vocab.txt")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise InputError(f"{folder} has no tokenizer: looked for {' and '.join(names)}")
    path = folder / "tokenizer_config.json"
    config = _read_json(path) if path.is_file() else {}
    added = config.get("added_tokens_decoder", {}).values()
    _refuse_added((token["content"] for token in added), where=str(path))
    fields = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "split_chinese",
    }
    switches = {ours: config[name] for name, ours in fields.items() if name in config}
    return found[0], switches


def _read_vocab(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); convert it") from None
    # Not splitlines(): U+2028, which would end a line there, is a piece of
    # bert-base-chinese.
    return text.removesuffix("\n").split("\n")


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 or not JSON
        raise InputError(
            f"{path} is not valid JSON ({error}); copy or save it again"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{path} does not hold a JSON object; copy or save it again")
    return content


def _read_tokenizer_json(path: Path) -> tuple[list[str], dict[str, bool | None]]:
    """The pieces by id and the switches; anything else must be as BERT has it."""
    text = json.dumps(_read_json(path))
    try:
        # The library fills in what files of older versions leave out.
        described = json.loads(tokenizers.Tokenizer.from_str(text).to_str())
    except Exception as error:  # the library raises no narrower class
        raise InputError(
            f"{path} is not a file of the tokenizers library ({error}); copy or save "
            f"it again"
        ) from None
    model = described["model"]
    if model["type"] != "WordPiece":
        raise InputError(
            f"{path}: model type {model['type']} is not supported; valid: WordPiece"
        )
    wrong = []
    for name, value in WORDPIECE_SETTINGS.items():
        part, field = name.split(".")
        found = (described[part] or {}).get(field)
        if found != value:
            wrong.append(f"{name} is {found!r} (valid: {value!r})")
    if wrong:
        raise InputError(f"{path} is not BERT's WordPiece: {'; '.join(wrong)}")
    added = (token["content"] for token in described["added_tokens"])
    _refuse_added(added, where=str(path))
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    if [model["vocab"][piece] for piece in vocab] != list(range(len(vocab))):
        raise InputError(
            f"{path}: the ids of its {len(vocab)} pieces are not 0 to "
            f"{len(vocab) - 1}; number them without gaps"
        )
    normalizer = described["normalizer"]
    return vocab, {
        "lowercase": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "split_chinese": normalizer["handle_chinese_chars"],
    }


def _refuse_added(pieces: Iterable[str], *, where: str) -> None:
    """Added tokens are found before words are, so ignoring them would change ids."""
    extra = [piece for piece in pieces if piece not in SPECIALS]
    if extra:
        raise InputError(
            f"{where}: added tokens are not supported: {', '.join(extra)}; give them "
            f"the places of [unused] pieces in the vocabulary"
        )
