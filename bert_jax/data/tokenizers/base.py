"""The Tokenizer: what every kind of vocabulary has and does.

A kind says how text becomes ids (`encode_batch`), where in the text each piece stands
(`encode_offsets_batch`), and which files hold it (`save`). Word numbers and special
tokens are the same for all.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from bert_jax.errors import InputError, unknown

Places = list[tuple[int, int]]


class Tokenizer:
    """A vocabulary, the rules that go with it, and what follows from both.

    kind          wordpiece, chars, bpe or unigram
    vocab, size   the pieces by id, and how many
    pad_id, unk_id, cls_id, sep_id, mask_id
                  None where the convention has no such token; `sep_id` is what ends a
                  text, also where that is called the end of a sequence (T5, GPT-2)
    special_ids   sorted; never to be predicted
    starts        bool [V], True where a piece begins a word; special tokens do
    tells_starts  whether it tells: else `starts` is True for all (GPT)
    joint         what goes before a sentence that follows another one of its document,
                  where each is encoded on its own: " " for bytes, else nothing
    hash          stands for everything that determines ids
    """

    kind: str
    joint = ""
    tells_starts = True
    vocab: list[str]
    starts: np.ndarray
    hash: str

    def _describe(
        self, vocab: Sequence[str], *, specials: Mapping[str, str], also: Iterable[str]
    ) -> None:
        """Sets the vocabulary and the special ids.

        `specials` is {"pad_token": piece, ...}, as transformers spells it, and `also`
        names special pieces without a role.
        """
        self.vocab = list(vocab)
        self._ids = ids = {piece: i for i, piece in enumerate(self.vocab)}
        self.specials = dict(specials)
        roles = {"sep_token": specials.get("eos_token")} | dict(specials)
        for role in ("pad", "unk", "cls", "sep", "mask"):
            setattr(self, f"{role}_id", ids.get(roles.get(f"{role}_token")))
        pieces = {*specials.values(), *also}
        self.special_ids = tuple(sorted(ids[piece] for piece in pieces))

    @property
    def token_ids(self) -> dict[str, int]:
        """{"pad_token_id": 0, ...}: what a config.json says of special tokens."""
        return {f"{name}_id": self._ids[piece] for name, piece in self.specials.items()}

    def _set_hash(self, content: object) -> None:
        self.hash = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        return len(self.vocab)

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer that holds every id."""
        return np.dtype("<u2" if self.size <= 1 << 16 else "<u4")

    def encode(
        self, text: str, *, specials: Literal["text", "parse"] = "text"
    ) -> list[int]:
        """Ids of a text, nothing added at its ends.

        With "text" a "[MASK]" in the text is characters like any others; with "parse"
        it is the special token.
        """
        ways = {"text": lambda text: self.encode_batch([text])[0], "parse": self._parse}
        if specials not in ways:
            raise InputError(unknown("specials", specials, ways))
        return ways[specials](text)

    def wrap(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """One text with the special tokens that members put around it, and the types
        of all: [CLS] text [SEP], and XLNet's text <sep> <cls>."""
        if getattr(self, "style", "") == "xlnet":
            return [*ids, self.sep_id, self.cls_id], [*[0] * (len(ids) + 1), 2]
        ends = ([self.cls_id], [self.sep_id])
        first, last = ([i for i in end if i is not None] for end in ends)
        return [*first, *ids, *last], [0] * (len(first) + len(ids) + len(last))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` with specials="text", for many texts, on all cores."""
        raise NotImplementedError

    def encode_fast(self, texts: Sequence[str]) -> list[np.ndarray]:
        """What `encode_batch` gives, as arrays of `dtype`, by the fastest way there is.

        The arrays may be read-only.
        """
        raise NotImplementedError

    def encode_offsets(self, text: str) -> tuple[list[int], Places]:
        """As `encode` with specials="text", with each piece's place text[start:end].

        Places hold no white space at their ends; a piece that is nothing else has an
        empty one.
        """
        return self.encode_offsets_batch([text])[0]

    def encode_offsets_batch(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Places]]:
        """As `encode_offsets`, for many texts."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens included."""
        raise NotImplementedError

    def word_numbers(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The number of each piece's word, from 0: [..., S] -> int32 [..., S].

        A row cut inside a word begins with a piece from its middle: that too is word 0.
        """
        numbers = np.cumsum(self.starts[np.asarray(ids, int)], axis=-1, dtype=np.int32)
        return numbers - numbers[..., :1]

    def save(self, path: str | os.PathLike) -> None:
        """Write the files from which transformers and `load_tokenizer` get the same."""
        raise NotImplementedError

    def _parse(self, text: str) -> list[int]:
        raise NotImplementedError


def trim(text: str, start: int, end: int) -> tuple[int, int]:
    """A place without the white space at its ends."""
    start = end - len(text[start:end].lstrip())
    return start, start + len(text[start:end].rstrip())


def write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def write_tokenizer_json(path: Path, backend) -> None:
    """As the library's own save(), whose errors do not tell a full disk."""
    text = backend.to_str(pretty=True)
    (path / "tokenizer.json").write_text(text, encoding="utf-8")
