"""tf.data feeds the step: the batch of step k is a pure function of (seed, k).

The only state of the stream is the step number; resuming at step k reads nothing that
came before it. Each process builds only its own part of the rows.
"""

import zlib
from collections.abc import Iterator

import numpy as np

from bert_jax.data.rows import Rows

Batch = dict[str, np.ndarray]


def train_batches(
    rows: Rows, *, size: int, start: int, stop: int, part: slice
) -> Iterator[Batch]:
    """The batches of steps start..stop; of each the rows `part` out of `size`."""

    def build(step: np.int64) -> list[np.ndarray]:
        numbers = range(int(step) * size, (int(step) + 1) * size)[part]
        places = [rows.locate(number) for number in numbers]
        return list(rows.build(places, len(places)).values())

    return _stream(rows, build, start, stop)


def eval_batches(rows: Rows, *, size: int, count: int | None = None) -> Iterator[Batch]:
    """The rows of the first epoch in their order, or the first `count` of them.

    The last batch is filled up with rows of padding, whose row_id is -1.
    """
    total = rows.per_epoch if count is None else min(count, rows.per_epoch)

    def build(step: np.int64) -> list[np.ndarray]:
        numbers = range(int(step) * size, min((int(step) + 1) * size, total))
        return list(rows.build([(0, number) for number in numbers], size).values())

    return _stream(rows, build, 0, -(-total // size))


def _stream(rows: Rows, build, start: int, stop: int) -> Iterator[Batch]:
    import tensorflow as tf

    names = list(rows.empty(1))
    types = [tf.int32] * len(names)
    steps = tf.data.Dataset.range(start, stop)
    batches = steps.map(
        lambda step: tf.numpy_function(build, [step], types),
        num_parallel_calls=2,
        deterministic=True,
    )
    for arrays in batches.prefetch(4).as_numpy_iterator():
        yield dict(zip(names, arrays, strict=True))


def checksum(batch: Batch) -> str:
    """Eight hex digits that tell one batch from another."""
    total = 0
    for name in sorted(batch):
        total = zlib.crc32(np.ascontiguousarray(batch[name]), total)
    return f"{total:08x}"
