"""A vocabulary of characters, as Chinese BERT uses: every character is a piece.

It is a WordPiece vocabulary without merges. Chinese characters always stand alone;
letters and digits do so too, where those inside a word carry the prefix `##`, which
is how BertTokenizer, reading the same vocab.txt, gives the same ids.
"""

from collections import Counter
from collections.abc import Iterable

from bert_jax.data.tokenizers.wordpiece import (
    PREFIX,
    SPECIALS,
    WordPiece,
    count_words,
)
from bert_jax.errors import InputError


def train_chars(
    texts: Iterable[str],
    *,
    vocab_size: int | None = None,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    progress: bool = True,
) -> WordPiece:
    """The most frequent characters of the texts, most frequent first.

    With `vocab_size` None all of them. A word with a rarer one becomes [UNK].
    """
    blank = WordPiece(SPECIALS, lowercase=lowercase, strip_accents=strip_accents)
    words, _ = count_words(texts, blank=blank, progress=progress)
    if not words:
        raise InputError("the training text is empty; give at least one character")
    counts = Counter()
    for word, count in words.items():
        counts[word[0]] += count
        for char in word[1:]:
            counts[PREFIX + char] += count
    largest = len(SPECIALS) + len(counts)
    vocab_size = largest if vocab_size is None else vocab_size
    if vocab_size <= len(SPECIALS):
        raise InputError(
            f"vocab_size={vocab_size} is too small: {len(SPECIALS)} special tokens and "
            f"one character make at least {len(SPECIALS) + 1}"
        )
    if vocab_size > largest:
        raise InputError(
            f"vocab_size={vocab_size} is too large: with {len(SPECIALS)} special "
            f"tokens and the {len(counts)} characters of the text, alone and inside "
            f"words, there are only {largest} pieces"
        )
    pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return WordPiece(
        [*SPECIALS, *pieces[: vocab_size - len(SPECIALS)]],
        lowercase=lowercase,
        strip_accents=strip_accents,
    )
