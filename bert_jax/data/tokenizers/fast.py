"""Looking up words instead of encoding them again.

Nearly all text is words seen before. Where the ids of a text are the ids of its chunks
(what stands between spaces), one after the other, a dict from chunk to ids does the
work of the library. A new chunk is cut once more, at punctuation, so that the library
sees only parts that are new too. Each kind says in `_chunks` and `_parts` where that
holds.
"""

from array import array
from collections.abc import Sequence

import numpy as np

CHUNKS = 1 << 18  # remembered at a time; about 50 MB
LONGEST = 32  # characters; longer chunks hardly come twice


class ChunkMemory(dict):
    """Ids of the chunks met before, as bytes, for these are quick to join."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.dtype = tokenizer.dtype
        self.form = "H" if self.dtype.itemsize == 2 else "I"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        rows, whole = [], []
        chunks_of, ids_of = self.tokenizer._chunks, self.__getitem__
        for text in texts:
            chunks = chunks_of(text)
            if chunks is None:
                whole.append(len(rows))
                chunks = ()
            rows.append(b"".join(map(ids_of, chunks)))
        encoded = self.tokenizer.encode_batch([texts[i] for i in whole])
        for i, ids in zip(whole, encoded, strict=True):
            rows[i] = self.pack(ids)
        return [np.frombuffer(row, self.dtype) for row in rows]

    def __missing__(self, chunk: str) -> bytes:
        parts = self.tokenizer._parts(chunk)
        if len(parts) == 1:
            ids = self.pack(self.tokenizer._encode_part(parts[0]))
        else:
            ids = b"".join([self[part] for part in parts])
        if len(chunk) <= LONGEST:
            if len(self) >= CHUNKS:
                self.clear()  # other text, other words
            self[chunk] = ids
        return ids

    def pack(self, ids: Sequence[int]) -> bytes:
        # `array` is five times as fast as numpy on a handful of numbers.
        return array(self.form, ids).tobytes()
