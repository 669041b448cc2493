"""BPE of words, as OpenAI's GPT has it: the last piece of a word carries `</w>`.

Text is lower-cased and cut into words as BERT's is; the characters of a word, the last
of them with `</w>`, are merged pair by pair in the order in which the pairs were
learned, and a character without a piece is <unk>. GPT (Radford et al. 2018), BPE
(https://arxiv.org/abs/1508.07909). The Rust library `tokenizers` does the work.

A piece shows whether it ends a word, not whether it begins one. So `starts` is True for
all: in rows every piece counts as a word, which objectives that need words refuse,
unless `prepare` was given words=spaces and stored where words begin. `word_numbers`,
which sees the piece before, is exact but for <unk>, which may stand anywhere in a word
and counts as one of its own.

Differs from the release, as transformers does, which has the same rules: spaCy cut the
words there, after ftfy had repaired the text, accents stayed, and a new line was a
piece of its own.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bert_jax.data.tokenizers.base import write_json, write_tokenizer_json
from bert_jax.data.tokenizers.byte_bpe import check_pieces, write_merges
from bert_jax.data.tokenizers.rust import RustTokenizer
from bert_jax.data.tokenizers.wordpiece import PARTS, PLAIN_CHINESE

STYLE = "openai-gpt"
SUFFIX = "</w>"
UNKNOWN = "<unk>"
NEW_LINE = f"\n{SUFFIX}"


class WordBPE(RustTokenizer):
    """Pieces by id, and the merges in the order in which they apply.

    GPT has no token that ends a text, which rows of several texts need: `sep_id` is the
    new line of the released vocabulary, which no text gives here, else <unk>.
    """

    kind = "bpe"
    style = STYLE
    tells_starts = False

    def __init__(
        self,
        vocab: Sequence[str],
        merges: Sequence[tuple[str, str]],
        *,
        where: str = "the vocabulary",
    ):
        """Errors name `where`."""
        self.merges = [tuple(pair) for pair in merges]
        ends = [piece.endswith(SUFFIX) for piece in vocab]
        needed = [UNKNOWN] if any(ends) else [UNKNOWN, f"that end in {SUFFIX}"]
        check_pieces(vocab, self.merges, needed=needed, style=STYLE, where=where)
        also = [NEW_LINE] if NEW_LINE in vocab else []
        self._describe(vocab, specials={"unk_token": UNKNOWN}, also=also)
        self.sep_id = self._ids.get(NEW_LINE, self.unk_id)
        self.starts = np.ones(self.size, bool)
        self.ends = np.array(ends)
        self.ends[self.unk_id] = True
        self._set_hash([self.kind, STYLE, self.vocab, self.merges])
        self._use(self._backend(), self._backend(), [UNKNOWN])

    def wrap(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """GPT puts nothing around a text."""
        return list(ids), [0] * len(ids)

    def word_numbers(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, int)
        begins = np.zeros(ids.shape, bool)
        begins[..., 1:] = self.ends[ids[..., :-1]] | (ids[..., 1:] == self.unk_id)
        return np.cumsum(begins, axis=-1, dtype=np.int32)

    def save(self, path: str | os.PathLike) -> None:
        """Write the files from which transformers and `load_tokenizer` get the same."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        write_tokenizer_json(path, self._parsing)
        write_json(path / "vocab.json", self._ids)
        write_merges(path / "merges.txt", self.merges)
        config = {"tokenizer_class": "OpenAIGPTTokenizer"}
        write_json(path / "tokenizer_config.json", config | self.specials)

    def _chunks(self, text: str) -> list[str]:
        # A space ends a word whatever is around it, and all rules are by character.
        return text.split(" ")

    def _parts(self, chunk: str) -> list[str]:
        if not PLAIN_CHINESE.fullmatch(chunk):
            return [chunk]
        return PARTS.findall(chunk.lower())

    def _backend(self) -> tokenizers.Tokenizer:
        model = models.BPE(
            self._ids, self.merges, unk_token=UNKNOWN, end_of_word_suffix=SUFFIX
        )
        backend = tokenizers.Tokenizer(model)
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.BPEDecoder(suffix=SUFFIX)
        return backend
