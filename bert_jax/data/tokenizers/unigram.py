"""Unigram pieces (sentencepiece), with the conventions of ALBERT, XLNet, T5 and XLM-R.

Of all ways to cut a text into pieces the most probable one is taken, where pieces are
independent: argmax of sum(log p(piece)). A space is written `▁` and belongs to the
piece after it. Kudo 2018 (https://arxiv.org/abs/1804.10959); ALBERT
(https://arxiv.org/abs/1909.11942), XLNet (https://arxiv.org/abs/1906.08237), T5
(https://arxiv.org/abs/1910.10683). The library `sentencepiece` does the work.

ALBERT and XLNet first change the text (unigram_text.py), and cut a comma off a digit:
`9,` is one piece of their models, but becomes `9` and `,`.

Differs from the releases: ALBERT's code leaves `` and '' alone where XLNet's, and that
of transformers for both, makes them "; it also looks for `▁` in vain under Python 3 and
so gives `▁9` inside words, which here is `9`. A digit and a comma that are both unknown
stay one unknown piece.

XLM-R (https://arxiv.org/abs/1911.02116) and CamemBERT number pieces as fairseq's
dictionary does: a few of its own come first, then those of the model, then <mask>.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bert_jax.data.tokenizers.base import Places, Tokenizer, trim, write_json
from bert_jax.data.tokenizers.sentencepiece_file import (
    CONTROL,
    ModelFile,
    read_model_file,
)
from bert_jax.data.tokenizers.unigram_json import exact_scores, make_backend
from bert_jax.data.tokenizers.unigram_text import align_text, change_text
from bert_jax.errors import InputError, unknown

SPACE = "▁"
SENTINELS = 100  # T5's, after the pieces of the model
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
PUNCTUATION = frozenset('!"#$%&()*+,-./:;?@[\\]^_`{|}~€£')


@dataclass(frozen=True)
class Style:
    """A convention: special tokens by role, others, and what is done to the text."""

    specials: dict[str, str]
    also: tuple[str, ...] = ()
    changes_text: bool = True  # and cuts a comma off a digit
    lowercase: bool = False
    sentinels: int = 0
    # The vocabulary: these, the model's pieces but for its first few, and those.
    first: tuple[str, ...] = ()
    skip: int = 0
    last: tuple[str, ...] = ()


FAIRSEQ = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
}
STYLES = {
    "xlm-roberta": Style(
        FAIRSEQ,
        changes_text=False,
        first=("<s>", "<pad>", "</s>", "<unk>"),
        skip=3,
        last=("<mask>",),
    ),
    "camembert": Style(
        FAIRSEQ,
        changes_text=False,
        first=("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"),
        skip=1,
        last=("<mask>",),
    ),
    "albert": Style(
        {
            "bos_token": "[CLS]",
            "eos_token": "[SEP]",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        },
        lowercase=True,
    ),
    "xlnet": Style(
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "cls_token": "<cls>",
            "sep_token": "<sep>",
            "mask_token": "<mask>",
        },
        also=("<eod>", "<eop>"),
    ),
    "t5": Style(
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        changes_text=False,
        sentinels=SENTINELS,
    ),
}


class Unigram(Tokenizer):
    """A sentencepiece model and the convention it is used with.

    `sentinels` are T5's, in the order of use: 32099 down to 32000.
    """

    kind = "unigram"

    def __init__(
        self,
        model: bytes,
        *,
        style: str,
        lowercase: bool | None = None,
        strip_accents: bool | None = None,
        where: str = "the model",
    ):
        """`model` is the content of a model file; the switches None are the style's.

        Errors name `where`.
        """
        rules = check_style(style, lowercase=lowercase, strip_accents=strip_accents)
        self.style = style
        self.lowercase = rules.lowercase if lowercase is None else lowercase
        self.strip_accents = (
            rules.changes_text if strip_accents is None else strip_accents
        )
        self.model = model
        file = read_model_file(model, where=where)
        self._file = renumbered(file, rules)
        pieces = [*self._file.pieces, *rules.last]
        needed = [*rules.specials.values(), *rules.also]
        missing = [piece for piece in dict.fromkeys(needed) if piece not in pieces]
        if not set(file.pieces[: rules.skip]) <= set(rules.first):
            missing += rules.first[: rules.skip]
        if missing:
            raise InputError(
                f"{where}: no special tokens {', '.join(missing)}; is it a model of "
                f"another style than {style}? Valid: {', '.join(STYLES)}"
            )
        sentinels = [f"<extra_id_{i}>" for i in reversed(range(rules.sentinels))]
        self._describe(
            [*pieces, *sentinels],
            specials=rules.specials,
            also=[*rules.also, *sentinels],
        )
        self.sentinels = tuple(reversed(range(len(pieces), self.size)))
        self._numbers = numbers_of(file, rules)
        self.starts = np.array([is_start(piece) for piece in self.vocab])
        self.starts[list(self.special_ids)] = True
        digest = hashlib.sha256(model).hexdigest()
        self._set_hash([self.kind, style, self.lowercase, self.strip_accents, digest])
        self._processor = load_processor(model)
        self._commas = self._cut_commas() if rules.changes_text else {}
        self.changes_text = rules.changes_text

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []  # the library cannot
        rows = self._processor.encode([self._change(text) for text in texts])
        return [self._without_commas(self._renumber(row)) for row in rows]

    def encode_fast(self, texts: Sequence[str]) -> list[np.ndarray]:
        """What `encode_batch` gives, as arrays.

        Words are not looked up (fast.py): sentencepiece is nearly as fast, and what it
        gives for a word depends on the text before it. It adds up single-precision
        scores from the start of the text, and where two cuts are equal, as in `aaa`,
        their last digits decide.
        """
        return [np.array(row, self.dtype) for row in self.encode_batch(texts)]

    def encode_offsets_batch(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Places]]:
        return [self._encode_offsets(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        text = "".join(self.vocab[int(i)] for i in ids)
        return text.replace(SPACE, " ").removeprefix(" ")

    def save(self, path: str | os.PathLike) -> None:
        """Write the files from which `load_tokenizer` gets the same.

        transformers reads tokenizer.json, which comes close: see unigram_json.py.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / "spiece.model").write_bytes(self.model)
        backend = make_backend(self, self._file, commas=self._commas)
        text = exact_scores(backend.to_str(pretty=True))
        (path / "tokenizer.json").write_text(text, encoding="utf-8")
        config = {
            # AlbertTokenizer and so on would build something else from the same file.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "style": self.style,
            "do_lower_case": self.lowercase,
            "keep_accents": not self.strip_accents,
            **self.specials,
        }
        write_json(path / "tokenizer_config.json", config)

    def _renumber(self, ids: list[int]) -> list[int]:
        return ids if self._numbers is None else [self._numbers[i] for i in ids]

    def _change(self, text: str) -> str:
        if not self.changes_text:
            return text
        return change_text(
            text, lowercase=self.lowercase, strip_accents=self.strip_accents
        )

    def _cut_commas(self) -> dict[int, list[int]]:
        """What becomes of each piece that ends in a digit and a comma."""
        table = {}
        for i, piece in enumerate(self._file.pieces):
            if len(piece) < 2 or piece[-1] != "," or not piece[-2].isdigit():
                continue
            parts = self._processor.encode(piece[:-1].replace(SPACE, ""), out_type=str)
            if not piece.startswith(SPACE) and parts[0].startswith(SPACE):
                parts = [part for part in (parts[0][1:], *parts[1:]) if part]
            table[i] = [self._processor.piece_to_id(part) for part in (*parts, ",")]
        return table

    def _without_commas(self, row: list[int]) -> list[int]:
        if self._commas.keys().isdisjoint(row):
            return row
        return [part for i in row for part in self._commas.get(i, (i,))]

    def _encode_offsets(self, text: str) -> tuple[list[int], Places]:
        changed, spans = text, [(i, i + 1) for i in range(len(text))]
        if self.changes_text:
            changed, spans = align_text(
                text, lowercase=self.lowercase, strip_accents=self.strip_accents
            )
        spans = [*spans, (len(text), len(text))]
        found = self._processor.encode(changed, return_type="offset_mapping")
        ids, places = [], []
        found_ids = self._renumber(found["ids"])
        for i, place in zip(found_ids, found["offsets"], strict=True):
            start, end = trim(changed, *place)
            *parts, last = self._commas.get(i, [i])
            for part in parts:  # which take their characters from the left
                stop = min(start + len(self.vocab[part].lstrip(SPACE)), end)
                ids.append(part)
                places.append(_place(spans, start, stop))
                start = stop
            ids.append(last)
            places.append(_place(spans, start, end))
        return ids, places

    def _parse(self, text: str) -> list[int]:
        """Every part between special tokens is a text of its own."""
        ids = {self.vocab[i]: i for i in self.special_ids}
        pattern = "|".join(re.escape(piece) for piece in ids)
        row = []
        for part in re.split(f"({pattern})", text):
            row += [ids[part]] if part in ids else self.encode(part)
        return row


def renumbered(file: ModelFile, rules: Style) -> ModelFile:
    """The pieces of a model in the order of the style's vocabulary."""
    if not rules.first:
        return file
    skip, count = rules.skip, len(rules.first)
    return replace(
        file,
        pieces=[*rules.first, *file.pieces[skip:]],
        scores=[*[0.0] * count, *file.scores[skip:]],
        types=[*[CONTROL] * count, *file.types[skip:]],
    )


def numbers_of(file: ModelFile, rules: Style) -> list[int] | None:
    """The id in our vocabulary of each piece of the model; None where it is its own."""
    if not rules.first:
        return None
    after = range(len(rules.first), len(rules.first) + len(file.pieces) - rules.skip)
    return [*(rules.first.index(p) for p in file.pieces[: rules.skip]), *after]


def _place(spans: Places, start: int, end: int) -> tuple[int, int]:
    """Where in the text the changed characters from start to end came from."""
    return spans[start][0], spans[end - 1][1] if end > start else spans[start][0]


def is_start(piece: str) -> bool:
    """Whether a piece begins a word, by the rule of ALBERT and XLNet.

    So do `▁`, punctuation alone, and whatever holds a character that is neither
    punctuation nor an English letter: a digit, an accent, another script.
    """
    return (
        piece.startswith((SPACE, "<"))
        or piece in PUNCTUATION
        or not LETTERS.union(PUNCTUATION).issuperset(piece)
    )


def check_style(
    style: str, *, lowercase: bool | None, strip_accents: bool | None
) -> Style:
    if style not in STYLES:
        raise InputError(unknown("style of a unigram tokenizer", style, STYLES))
    if not STYLES[style].changes_text and (lowercase or strip_accents):
        raise InputError(
            f"style {style} leaves the text as it is: no lowercase, no strip_accents"
        )
    return STYLES[style]


def load_processor(model: bytes):
    return sentencepiece().SentencePieceProcessor(model_proto=model)


@functools.cache
def sentencepiece():
    """The library, imported when it is needed."""
    import sentencepiece

    sentencepiece.set_min_log_level(2)
    return sentencepiece
