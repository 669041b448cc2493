"""Learning a unigram vocabulary: the release's settings, one for each style.

sentencepiece starts from all frequent strings and drops, round by round, the pieces
whose loss lowers the likelihood of the text least, until `vocab_size` are left.
"""

import io
import itertools
import re
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from bert_jax.data.tokenizers.unigram import (
    Unigram,
    check_style,
    sentencepiece,
)
from bert_jax.data.tokenizers.unigram_text import change_text
from bert_jax.errors import InputError, unknown

OWN = ["(", ")", '"', "-", ".", "–", "£", "€"]  # always pieces of their own
SETTINGS = {
    "albert": {
        "pad_id": 0,
        "unk_id": 1,
        "bos_id": -1,
        "eos_id": -1,
        "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
        "user_defined_symbols": OWN,
    },
    "xlnet": {
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
        "user_defined_symbols": ["<eop>", ".", *(c for c in OWN if c != ".")],
    },
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
LINE = 1000  # characters; the trainer leaves out lines of more than 4,192 bytes


def train_unigram(
    texts: Iterable[str],
    *,
    vocab_size: int,
    style: str = "albert",
    lowercase: bool | None = None,
    strip_accents: bool | None = None,
    coverage: float = 0.99995,
    progress: bool = True,
) -> Unigram:
    """Learn a vocabulary of exactly `vocab_size` pieces; equal texts, equal result.

    T5's sentinels count as pieces. Rare characters beyond the share `coverage` of the
    text get no piece. The first 10 million lines are used.
    """
    rules = check_style(style, lowercase=lowercase, strip_accents=strip_accents)
    if style not in SETTINGS:
        raise InputError(
            unknown("style that a unigram vocabulary is trained for", style, SETTINGS)
        )
    if vocab_size <= rules.sentinels:
        raise InputError(
            f"vocab_size={vocab_size} is too small: {style} has {rules.sentinels} "
            f"sentinels, and characters and special tokens beside them"
        )
    switches = {
        "lowercase": rules.lowercase if lowercase is None else lowercase,
        "strip_accents": True if strip_accents is None else strip_accents,
    }
    lines = _lines(texts, switches if rules.changes_text else None)
    lines = iter(tqdm(lines, desc="reading", unit=" lines", disable=not progress))
    first = next(lines, None)
    if first is None:
        raise InputError("the training text is empty; give at least one word")
    model = io.BytesIO()
    try:
        sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first], lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size - rules.sentinels,
            character_coverage=coverage,
            input_sentence_size=10_000_000,
            shuffle_input_sentence=False,
            # The sums of each thread are added in a fixed order: their number decides
            # the last digits, their timing does not.
            num_threads=4,
            minloglevel=2,
            **SETTINGS[style],
        )
    except (RuntimeError, OSError) as error:
        raise InputError(_explain(str(error), vocab_size, rules.sentinels)) from None
    return Unigram(
        model.getvalue(),
        style=style,
        lowercase=lowercase,
        strip_accents=strip_accents,
        where="the trained model",
    )


def _lines(texts: Iterable[str], switches: dict | None) -> Iterator[str]:
    """Lines short enough for the trainer, cut between words, as they are encoded."""
    for text in texts:
        for line in text.splitlines():
            for part in re.findall(rf"\S.{{0,{LINE}}}(?!\S)|\S{{1,{LINE}}}", line):
                changed = change_text(part, **switches) if switches else part
                if changed.strip():
                    yield changed


def _explain(message: str, vocab_size: int, sentinels: int) -> str:
    """The library's complaint about the size, in our words."""
    if found := re.search(r"value <= (\d+)", message):
        return (
            f"vocab_size={vocab_size} is too large: only "
            f"{int(found[1]) + sentinels} pieces can be made from the text; lower "
            f"vocab_size or give more text"
        )
    if found := re.search(r"required_chars.*? (\d+) vs (\d+)", message):
        return (
            f"vocab_size={vocab_size} is too small: characters and special tokens of "
            f"the text make at least {int(found[2]) + sentinels}"
        )
    return f"sentencepiece cannot train on this text: {message}"
