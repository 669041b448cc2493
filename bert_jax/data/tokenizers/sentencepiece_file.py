"""Reading a sentencepiece model file: the pieces, and how text is normalised.

The file is a protocol buffer (sentencepiece_model.proto). The few fields that matter
are read here, so that neither protobuf nor generated code is needed.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from bert_jax.errors import InputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces
UNIGRAM = 1


@dataclass(frozen=True)
class ModelFile:
    """What a model file says; `charsmap` is its compiled table of normalisation."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    normalization: str  # its name, as nmt_nfkc
    charsmap: bytes
    adds_space: bool  # before the first word
    collapses_spaces: bool


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: an int, or the bytes of anything longer."""
    at, end = 0, len(message)

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < end:
        tag = varint()
        form = tag & 7
        if form == 0:
            yield tag >> 3, varint()
            continue
        if form not in (1, 2, 5):
            raise ValueError(f"wire type {form} at byte {at}")
        size = varint() if form == 2 else {1: 8, 5: 4}[form]
        if at + size > end:
            raise ValueError("the file ends early")
        yield tag >> 3, message[at : at + size]
        at += size


def read_model_file(content: bytes, *, where: str) -> ModelFile:
    """Parses a model file; errors name `where`."""
    pieces, scores, types = [], [], []
    trainer, normalizer = {}, {}
    try:
        for number, value in fields(content):
            if number == 1:
                piece = dict(fields(value))
                pieces.append(piece[1].decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                types.append(piece.get(3, NORMAL))
            elif number == 2:
                trainer = dict(fields(value))
            elif number == 3:
                normalizer = dict(fields(value))
    except (
        ValueError,
        IndexError,
        KeyError,
        AttributeError,
        TypeError,
        struct.error,
    ) as error:
        raise InputError(
            f"{where} is not a sentencepiece model ({error}); copy it again"
        ) from None
    if not pieces:
        raise InputError(f"{where} is not a sentencepiece model: it has no pieces")
    wrong = []
    if trainer.get(3, UNIGRAM) != UNIGRAM:
        names = {2: "bpe", 3: "word", 4: "char"}
        wrong.append(f"its type is {names.get(trainer[3], trainer[3])}, not unigram")
    if trainer.get(24, 0):
        wrong.append("it puts the sign for a space behind words, not before them")
    if wrong:
        raise InputError(f"{where} is not supported: {'; '.join(wrong)}")
    return ModelFile(
        pieces=pieces,
        scores=scores,
        types=types,
        normalization=normalizer.get(1, b"").decode(),
        charsmap=normalizer.get(2, b""),
        adds_space=bool(normalizer.get(3, 1)),
        collapses_spaces=bool(normalizer.get(4, 1)),
    )
