"""Byte-level BPE: pieces are merged bytes, so any text has ids and nothing is unknown.

Text is cut into words, each with the space before it, and a word's UTF-8 bytes are
merged pair by pair in the order in which the pairs were learned. Every byte is written
as a printable character, the space as `Ġ`. GPT-2 (Radford et al. 2019) numbers bytes,
merges, <|endoftext|>; RoBERTa (https://arxiv.org/abs/1907.11692) the same pieces with
<s> <pad> </s> <unk> first and <mask> last. The Rust library `tokenizers` does the work.

Differs from the releases in nothing known.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from bert_jax.data.tokenizers.base import write_json, write_tokenizer_json
from bert_jax.data.tokenizers.rust import RustTokenizer
from bert_jax.errors import InputError, unknown

STYLES = {
    "roberta": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "mask_token": "<mask>",
    },
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
}
FIRST = {"roberta": ("<s>", "<pad>", "</s>", "<unk>"), "gpt2": ()}
LAST = {"roberta": ("<mask>",), "gpt2": ("<|endoftext|>",)}
CLASSES = {"roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer"}
SPACE = "Ġ"
# GPT-2's words, of plain ASCII text.
PARTS = re.compile("'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^ A-Za-z0-9]+| ")


def byte_characters() -> list[str]:
    """The character that stands for each byte: itself where it is printable."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(i if i in printable else next(others)) for i in range(256)]


BYTES = byte_characters()


class ByteBPE(RustTokenizer):
    """Pieces by id, and the merges in the order in which they apply."""

    kind = "bpe"
    joint = " "

    def __init__(
        self,
        vocab: Sequence[str],
        merges: Sequence[tuple[str, str]],
        *,
        style: str,
        where: str = "the vocabulary",
    ):
        """Errors name `where`."""
        check_style(style)
        self.style, self.merges = style, [tuple(pair) for pair in merges]
        needed = [*FIRST[style], *LAST[style], *BYTES]
        check_pieces(vocab, self.merges, needed=needed, style=style, where=where)
        self._describe(vocab, specials=STYLES[style], also=())
        self.starts = np.array([piece.startswith(SPACE) for piece in self.vocab])
        self.starts[list(self.special_ids)] = True
        self._set_hash([self.kind, style, self.vocab, self.merges])
        specials = [
            # As transformers: the space before <mask> belongs to it.
            tokenizers.AddedToken(piece, lstrip=piece == "<mask>", special=True)
            for piece in (*FIRST[style], *LAST[style])
        ]
        self._use(self._backend(), self._backend(), specials)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids: nothing is lost, also where a character is cut."""
        return b"".join([self._bytes[int(i)] for i in ids])

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each piece."""
        byte_of = {char: byte for byte, char in enumerate(BYTES)}
        return [bytes(map(byte_of.__getitem__, piece)) for piece in self.vocab]

    def save(self, path: str | os.PathLike) -> None:
        """Write the files from which transformers and `load_tokenizer` get the same."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        write_tokenizer_json(path, self._parsing)
        write_json(path / "vocab.json", self._ids)
        write_merges(path / "merges.txt", self.merges)
        config = {"tokenizer_class": CLASSES[self.style], "add_prefix_space": False}
        write_json(path / "tokenizer_config.json", config | self.specials)

    def _chunks(self, text: str) -> list[str] | None:
        # Each chunk takes its space along. Runs of white space are cut by what comes
        # after them; single spaces, the only white space that is printable, are not.
        if "  " in text or not text.isprintable():
            return None
        return text.replace(" ", "\n ").split("\n")

    def _parts(self, chunk: str) -> list[str]:
        return PARTS.findall(chunk) if chunk.isascii() else [chunk]

    def _backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE(self._ids, self.merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        # Unused here, where rows are built later; the saved file is to be complete.
        if self.style == "roberta":
            backend.post_processor = processors.RobertaProcessing(
                ("</s>", self.sep_id), ("<s>", self.cls_id), add_prefix_space=False
            )
        else:
            backend.post_processor = processors.ByteLevel(trim_offsets=False)
        return backend


def train_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    style: str = "roberta",
    progress: bool = True,
) -> ByteBPE:
    """Learn a vocabulary of exactly `vocab_size` pieces; equal texts, equal result."""
    check_style(style)
    specials = len(FIRST[style]) + len(LAST[style])
    smallest = specials + len(BYTES)
    if vocab_size < smallest:
        raise InputError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {specials} special "
            f"tokens make at least {smallest}"
        )
    # Bytes are numbered in the order of their characters and ties between merges go by
    # number, so the result does not depend on the order in which words are counted.
    trainer = BpeTrainer(
        vocab_size=vocab_size - specials, initial_alphabet=BYTES, show_progress=progress
    )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(texts, trainer)
    if not json.loads(trainer.__getstate__())["BpeTrainer"]["words"]:
        raise InputError("the training text is empty; give at least one word")
    model = json.loads(backend.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    vocab = [*FIRST[style], *pieces, *LAST[style]]
    if len(vocab) < vocab_size:
        raise InputError(
            f"vocab_size={vocab_size} is too large: only {len(vocab)} pieces can be "
            f"made from the text; lower vocab_size or give more text"
        )
    return ByteBPE(vocab, model["merges"], style=style)


def check_style(style: str) -> None:
    if style not in STYLES:
        raise InputError(unknown("style of a bpe tokenizer", style, STYLES))


def write_merges(path: Path, merges: Iterable[tuple[str, str]]) -> None:
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    path.write_text(f"#version: 0.2\n{lines}", encoding="utf-8")


def check_pieces(
    vocab: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    needed: Sequence[str],
    style: str,
    where: str,
) -> None:
    known = set(vocab)
    problems = {
        "no pieces": [piece for piece in needed if piece not in known],
        "merges of pieces it does not have": [
            f"{left} {right}"
            for left, right in merges
            if not {left, right, left + right} <= known
        ],
    }
    wrong = [
        f"{what}: {', '.join(found[:10])}{', ...' if len(found) > 10 else ''}"
        for what, found in problems.items()
        if found
    ]
    if len(known) < len(vocab):
        wrong.append(f"{len(vocab) - len(known)} pieces more than once")
    if wrong:
        raise InputError(f"{where} is no {style} vocabulary: {'; '.join(wrong)}")
