"""The same unigram tokenizer, said with the components of the library `tokenizers`.

It is what transformers loads. The library differs from sentencepiece in what cannot be
said away: sums of scores are double precision, so cuts of (nearly) equal score may
swap, as in `aaa`; and characters younger than its Unicode are not decomposed. Of the
real lines in tests/data/test_tokenizers_kinds, 14 of 87,732 differ. There is also no
step after the search, where the comma is cut off a digit: for that the pieces which end
in a digit and a comma are made as good as impossible, so others are found for them.
"""

import re
import unicodedata
from collections.abc import Container
from fractions import Fraction

import tokenizers
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from bert_jax.data.tokenizers.sentencepiece_file import USER_DEFINED, ModelFile

SPACE = "▁"
NEVER = -1e6  # a score no path would take
LAYOUTS = {  # of one text, and of two
    "albert": ("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"),
    "xlnet": ("$A:0 <sep>:0 <cls>:2", "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2"),
    "t5": ("$A:0 </s>:0", "$A:0 </s>:0 $B:0 </s>:0"),
    **dict.fromkeys(
        ("xlm-roberta", "camembert"),
        ("<s>:0 $A:0 </s>:0", "<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0"),
    ),
}


def make_backend(
    tokenizer, file: ModelFile, *, commas: Container[int]
) -> tokenizers.Tokenizer:
    scores = [NEVER if i in commas else score for i, score in enumerate(file.scores)]
    vocab = list(zip(file.pieces, scores, strict=True))
    vocab += [(piece, 0.0) for piece in tokenizer.vocab[len(vocab) :]]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=tokenizer.unk_id))
    backend.normalizer = normalizers.Sequence(list(_normalizers(tokenizer, file)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(_pre_tokenizers(file)))
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    single, pair = LAYOUTS[tokenizer.style]
    special = [tokenizer.vocab[i] for i in tokenizer.special_ids]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[
            (tokenizer.vocab[i], i)
            for i in (tokenizer.cls_id, tokenizer.sep_id)
            if i is not None
        ],
    )
    backend.add_special_tokens(special)
    return backend


def exact_scores(text: str) -> str:
    """A tokenizer.json whose scores are, once read, what they are in the model."""
    return re.sub(r"-?\d+\.\d+(?=\s*\])", lambda found: _as_read(found[0]), text)


def _as_read(number: str) -> str:
    """The same number, written so that the library reads it right.

    Its parser (serde_json's fast one) takes the digits as one integer, rounds that, and
    divides by a power of ten: many a number of 17 digits becomes its neighbour, and
    sums that are equal in the model no longer are.
    """
    value = abs(float(number))
    for places in range(12, 19):
        digits = round(Fraction(value) * 10**places)
        if digits < 1 << 63 and float(digits) / 10.0**places == value:
            whole, part = divmod(digits, 10**places)
            return f"{'-' * number.startswith('-')}{whole}.{part:0{places}d}"
    return number


def _normalizers(tokenizer, file: ModelFile):
    if tokenizer.changes_text:
        spaces = [chr(i) for i in range(0x110000) if chr(i).isspace()]
        yield normalizers.Replace(Regex(f"[{''.join(map(_escape, spaces))}]+"), " ")
        yield normalizers.Replace("``", '"')
        yield normalizers.Replace("''", '"')
        if tokenizer.strip_accents:
            yield normalizers.NFKD()
            yield normalizers.Replace(Regex(accents()), "")
        if tokenizer.lowercase:
            yield normalizers.Lowercase()
    if file.charsmap:
        # Most of the table is NFKC. Done by the library itself, it is done right also
        # where a grapheme has several characters.
        if "nfkc" in file.normalization:
            yield normalizers.NFKC()
        yield normalizers.Precompiled(file.charsmap)
    if file.collapses_spaces:
        yield normalizers.Replace(Regex(" +"), " ")
        yield normalizers.Replace(Regex("^ | $"), "")


def _pre_tokenizers(file: ModelFile):
    yield pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="always" if file.adds_space else "never"
    )
    # sentencepiece always takes a symbol that the user defined, and so does a cut.
    own = [
        piece
        for piece, kind in zip(file.pieces, file.types, strict=True)
        if kind == USER_DEFINED
    ]
    if own:
        escaped = "|".join(_escape(piece) for piece in sorted(own, key=len)[::-1])
        yield pre_tokenizers.Split(Regex(escaped), behavior="isolated")


def _escape(piece: str) -> str:
    return "".join(f"\\x{{{ord(char):x}}}" for char in piece)


def accents() -> str:
    """A character class of what `unicodedata.combining` says yes to."""
    codes = [i for i in range(0x110000) if unicodedata.combining(chr(i))]
    breaks = [i for i in range(1, len(codes)) if codes[i] != codes[i - 1] + 1]
    ranges = zip([0, *breaks], [*breaks, len(codes)], strict=True)
    parts = [f"\\x{{{codes[a]:x}}}-\\x{{{codes[b - 1]:x}}}" for a, b in ranges]
    return f"[{''.join(parts)}]"
