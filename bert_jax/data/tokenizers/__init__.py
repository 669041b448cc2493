"""Text to ids and back: one vocabulary on disk, one class for each kind of it.

| kind      | class     | pieces                               | used by             |
|-----------|-----------|--------------------------------------|---------------------|
| wordpiece | WordPiece | longest match, `##` inside a word    | BERT, ELECTRA       |
| chars     | WordPiece | single characters                    | Chinese BERT        |
| bpe       | ByteBPE   | merged bytes, `Ġ` for the space      | RoBERTa, GPT-2      |
| bpe       | WordBPE   | merged characters, `</w>` ends a word | GPT                 |
| unigram   | Unigram   | most probable pieces, `▁` for a space | ALBERT, XLNet, T5   |

`load_tokenizer` reads the files of a Hugging Face directory, `train_*` make a new
vocabulary from text, and all of them are a `Tokenizer` (base.py).
"""

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokenizers.byte_bpe import ByteBPE, train_bpe
from bert_jax.data.tokenizers.chars import train_chars
from bert_jax.data.tokenizers.load import load_tokenizer
from bert_jax.data.tokenizers.unigram import Unigram
from bert_jax.data.tokenizers.unigram_training import train_unigram
from bert_jax.data.tokenizers.word_bpe import WordBPE
from bert_jax.data.tokenizers.wordpiece import (
    PREFIX,
    SPECIALS,
    WordPiece,
    train_wordpiece,
)

__all__ = [
    "PREFIX",
    "SPECIALS",
    "ByteBPE",
    "Tokenizer",
    "Unigram",
    "WordBPE",
    "WordPiece",
    "load_tokenizer",
    "train_bpe",
    "train_chars",
    "train_unigram",
    "train_wordpiece",
]
