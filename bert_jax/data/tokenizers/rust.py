"""Kinds whose encoding is done by the Rust library `tokenizers`."""

from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers

from bert_jax.data.tokenizers.base import Places, Tokenizer, trim
from bert_jax.data.tokenizers.fast import ChunkMemory


class RustTokenizer(Tokenizer):
    """Two backends, which `_use` sets: one takes "[MASK]" as text, one as a token.

    Two, as the library's own switch is a mutable flag of the whole object: one thread
    could then change what another one encodes.
    """

    def _use(
        self,
        plain: tokenizers.Tokenizer,
        parsing: tokenizers.Tokenizer,
        specials: Sequence[str | tokenizers.AddedToken],
    ) -> None:
        self._plain, self._parsing = plain, parsing
        self._parsing.add_special_tokens(list(specials))
        self._memory = ChunkMemory(self)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        batch = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_fast(self, texts: Sequence[str]) -> list[np.ndarray]:
        """What `encode_batch` gives, as read-only arrays, on one core: see fast.py."""
        return self._memory.encode(texts)

    def encode_offsets_batch(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Places]]:
        batch = self._plain.encode_batch(texts, add_special_tokens=False)
        return [
            (encoding.ids, [trim(text, *place) for place in encoding.offsets])
            for text, encoding in zip(texts, batch, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens included, as transformers spaces it."""
        return self._parsing.decode([int(i) for i in ids], skip_special_tokens=False)

    def _parse(self, text: str) -> list[int]:
        return self._parsing.encode(text, add_special_tokens=False).ids

    def _chunks(self, text: str) -> list[str] | None:
        """Parts which, encoded each on its own, give the ids of the text, or None."""
        raise NotImplementedError

    def _parts(self, chunk: str) -> list[str]:
        """The same of a chunk, cut finer."""
        raise NotImplementedError

    def _encode_part(self, part: str) -> list[int]:
        return self._plain.encode(part, add_special_tokens=False).ids
