"""WordPiece: train, save and apply a BERT vocabulary.

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

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import WordPieceTrainer

from bert_jax.data.tokenizers.base import write_json, write_tokenizer_json
from bert_jax.data.tokenizers.rust import RustTokenizer
from bert_jax.errors import InputError

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PREFIX = "##"
LONGEST_WORD = 100  # characters; a longer one is [UNK]
# Text of ASCII words, and characters that always stand alone.
PARTS = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9]")
PLAIN = re.compile("[!-~]*")
PLAIN_CHINESE = re.compile("[!-~\u4e00-\u9fff，。、；：？！“”‘’（）《》…—·]*")


class WordPiece(RustTokenizer):
    """A vocabulary and the switches of its normalisation."""

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
        roles = {f"{piece[1:-1].lower()}_token": piece for piece in SPECIALS}
        self._describe(vocab, specials=roles, also=())
        self.lowercase = lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        self.split_chinese = split_chinese
        self.starts = np.array([not piece.startswith(PREFIX) for piece in vocab])
        switches = [self.lowercase, self.strip_accents, self.split_chinese]
        self._set_hash(["wordpiece", switches, self.vocab])
        self._use(self._backend(), self._backend(), SPECIALS)

    @property
    def kind(self) -> str:
        """chars where every piece is a character: the same rules, so the same hash."""
        words = (piece for piece in self.vocab if piece not in SPECIALS)
        single = all(len(piece.removeprefix(PREFIX)) == 1 for piece in words)
        return "chars" if single and self.size > len(SPECIALS) else "wordpiece"

    def save(self, path: str | os.PathLike) -> None:
        """Write the files from which transformers and `load_tokenizer` get the same."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{piece}\n" for piece in self.vocab)
        (path / "vocab.txt").write_text(lines, encoding="utf-8")
        write_tokenizer_json(path, self._parsing)
        # transformers takes the switches from here, not from tokenizer.json.
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.split_chinese,
            **self.specials,
        }
        write_json(path / "tokenizer_config.json", config)

    def _chunks(self, text: str) -> list[str]:
        # A space ends a word whatever is around it, and all rules are by character.
        return text.split(" ")

    def _parts(self, chunk: str) -> list[str]:
        if not (PLAIN_CHINESE if self.split_chinese else PLAIN).fullmatch(chunk):
            return [chunk]
        return PARTS.findall(chunk.lower() if self.lowercase else chunk)

    def _encode_part(self, part: str) -> list[int]:
        """The longest piece first, for a word that needs no normalisation.

        The library, which does the same, takes ten times as long to be called.
        """
        if not part.isascii() or not part.isalnum() or len(part) > LONGEST_WORD:
            return super()._encode_part(part)
        row, start, prefix = [], 0, ""
        while start < len(part):
            for end in range(len(part), start, -1):
                found = self._ids.get(prefix + part[start:end])
                if found is not None:
                    break
            else:
                return [self.unk_id]
            row.append(found)
            start, prefix = end, PREFIX
        return row

    def _backend(self) -> tokenizers.Tokenizer:
        model = models.WordPiece(
            self._ids,
            unk_token="[UNK]",
            max_input_chars_per_word=LONGEST_WORD,
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
) -> WordPiece:
    """Learn a vocabulary of exactly `vocab_size` pieces; equal texts, equal result.

    Its order: the special tokens, the characters, the ## characters, the merges.
    """
    blank = WordPiece(SPECIALS, lowercase=lowercase, strip_accents=strip_accents)
    counts, alphabet = count_words(texts, blank=blank, progress=progress)
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
    return WordPiece(
        sorted(ids, key=ids.get), lowercase=lowercase, strip_accents=strip_accents
    )


def _check_vocab(vocab: Sequence[str], *, where: str) -> None:
    missing = [piece for piece in SPECIALS if piece not in vocab]
    if missing:
        raise InputError(
            f"{where}: no special tokens {', '.join(missing)}; a WordPiece vocabulary "
            f"needs {', '.join(SPECIALS)}"
        )
    twice = [repr(piece) for piece, n in Counter(vocab).items() if n > 1]
    if twice:
        shown = ", ".join(twice[:10]) + (", ..." if len(twice) > 10 else "")
        raise InputError(
            f"{where}: {len(twice)} pieces occur more than once: {shown}; every piece "
            f"has one id, so remove the copies"
        )


def count_words(
    texts: Iterable[str], *, blank: WordPiece, progress: bool
) -> tuple[dict[str, int], list[str]]:
    """Occurrences of every normalised word, and the sorted pieces of one character."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = blank._plain.normalizer
    backend.pre_tokenizer = blank._plain.pre_tokenizer
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
