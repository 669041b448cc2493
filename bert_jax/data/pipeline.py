"""tf.data feeds the step: the batch of step k is a pure function of (seed, k).

The only state of the stream is the step number. Each process builds only its own rows
of a batch and reads only their text; what was read for a slot is kept until the slot
has gone through it, so nothing is read twice.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from bert_jax.data.order import DIRECTIONS, Order, Read
from bert_jax.data.rows import Batch, Rows
from bert_jax.errors import InputError, unknown

Part = slice | np.ndarray  # rows of a batch, by number
READERS = 16  # reads under way at a time; in a bucket each takes tens of milliseconds


class Stream:
    """Batches by number, asked for in order; any other order only reads more.

    With `both` the second half of the batch goes through the text of the first half
    from its end to its beginning (XLNet's bi-directional data).
    """

    def __init__(self, rows: Rows, order: Order, part: Part, *, both: bool = False):
        self.rows, self.order, self.both = rows, order, both
        self.slots = np.arange(order.batch * (2 if both else 1))[part].tolist()
        self.pool = ThreadPoolExecutor(READERS)
        self.under_way: dict[Read, tuple[Future, np.ndarray]] = {}

    def batch(self, step: int) -> Batch:
        size = self.order.batch
        found, samples = [], []
        for slot in self.slots:
            back, slot = divmod(slot, size)
            sample, back = step * size + slot, bool(back)
            read, place = self.order(sample, back=back)
            found.append((read, place))
            samples.append((sample, back))
            self.start(read)
            if self.rows.corpus.remote:  # what the slot will need after this
                left = place + 1 if back else read.last - read.first - place
                self.start(self.order(sample + left * size, back=back)[0])
        rows, pieces = [], []
        for read, place in found:
            text, order = self.under_way[read]
            pieces.append(text.result())
            rows.append(int(order[place]))
            if place == (0 if read.back else len(order) - 1):
                del self.under_way[read]
        batch = self.rows.build(rows, pieces, len(rows))
        self.rows.turn(batch, [n for n, (read, _) in enumerate(found) if read.back])
        batch["epoch"][:] = [read.epoch for read, _ in found]
        if "continues" in batch:
            batch["continues"][:] = [
                self.follows(row, sample - size, back)
                for row, (sample, back) in zip(rows, samples, strict=True)
            ]
        return batch

    def follows(self, row: int, sample: int, back: bool) -> bool:
        """Whether the row goes on where that of an earlier sample ends: it is the next
        one and, where attention is blocked across documents, of the same document."""
        if sample < 0:
            return False
        read, place = self.order(sample, back=back)
        before = int(self.order.rows_of(read)[place])
        if row - before != (-1 if back else 1):
            return False
        plan = self.rows.plan
        ended = plan.labels[plan.rows[max(row, before)] - 1] == 1
        return self.rows.across == "attend" or not ended

    def start(self, read: Read) -> None:
        if read not in self.under_way:
            text = self.pool.submit(self.rows.read, read.first, read.last)
            self.under_way[read] = text, self.order.rows_of(read)


def train_batches(
    rows: Rows,
    *,
    size: int,
    start: int,
    stop: int,
    part: Part,
    alpha: float = 1.0,
    direction: str = "forward",
) -> Iterator[Batch]:
    """The batches of steps start..stop; of each the rows `part` out of `size`.

    `alpha` is how inputs of the corpus are sampled, see order.py. With direction="both"
    half of a stream's slots go backwards.
    """
    if direction not in DIRECTIONS:
        raise InputError(unknown("direction", direction, DIRECTIONS))
    both = direction == "both"
    if both and (rows.kind != "stream" or size % 2):
        raise InputError(
            f"direction=both takes rows=stream and an even batch; got "
            f"rows={rows.kind} and batch={size}"
        )
    slots = size // 2 if both else size
    if len(rows) < slots:
        raise InputError(
            f"{rows.corpus.path} makes {len(rows)} {rows.kind} rows of {rows.length}, "
            f"fewer than one batch of {size}: use a smaller batch, shorter rows or "
            "more text"
        )
    order = Order(
        rows.plan.blocks,
        slots,
        rows.seed,
        shuffled=rows.kind != "stream",
        inputs=rows.plan.inputs,
        alpha=alpha,
    )
    stream = Stream(rows, order, part, both=both)
    return _through_tf_data(rows, stream.batch, start, stop)


def eval_batches(
    rows: Rows, *, size: int, count: int | None = None, part: Part = slice(None)
) -> Iterator[Batch]:
    """The rows of the plan in their order, or `count` of them spread over all; of each
    batch the rows `part` out of `size`.

    The last batch is filled up with rows of padding, whose row_id is -1.
    """
    total = len(rows) if count is None else min(count, len(rows))
    numbers = np.arange(total) * len(rows) // total
    slots = np.arange(size)[part]

    def batch(step: int) -> Batch:
        mine = step * size + slots
        chosen = numbers[mine[mine < total]].tolist()
        if chosen and chosen[-1] + 1 - chosen[0] == len(chosen):
            texts = [rows.read(chosen[0], chosen[-1] + 1)] * len(chosen)
        else:
            texts = [rows.read(number, number + 1) for number in chosen]
        return rows.build(chosen, texts, len(slots))

    return _through_tf_data(rows, batch, 0, -(-total // size))


def _through_tf_data(rows: Rows, batch, start: int, stop: int) -> Iterator[Batch]:
    import tensorflow as tf

    names = list(rows.empty(1))
    nothing = [np.zeros(0, np.int32)] * len(names)
    errors = []
    work = [batch]  # TensorFlow keeps `build` for good: its threads and text must go

    def build(step: np.int64) -> list[np.ndarray]:
        if errors or not work:  # nobody will take it
            return nothing
        try:
            return list(work[0](int(step)).values())
        except Exception as error:  # TensorFlow would wrap it in pages of its own
            errors.append(error)
            return nothing

    steps = tf.data.Dataset.range(start, stop)
    batches = steps.map(
        lambda step: tf.numpy_function(build, [step], [tf.int32] * len(names)),
        num_parallel_calls=1,
        deterministic=True,
    )
    try:
        for arrays in batches.prefetch(4).as_numpy_iterator():
            if errors and not len(arrays[0]):
                raise errors[0]
            yield dict(zip(names, arrays, strict=True))
    finally:
        work.clear()
        errors.clear()  # a traceback holds on to the stream


def checksum(batch: Batch, *, xp=np):
    """A uint32 that tells one batch from another: a sum over its elements, so that with
    xp=jax.numpy its rows may lie on many devices."""
    totals = []
    for number, name in enumerate(sorted(batch)):
        column = batch[name]
        place = xp.arange(column.size, dtype=xp.uint32).reshape(column.shape)
        x = (place + xp.uint32(number)) * xp.uint32(0x9E3779B9)
        x = (x ^ column.astype(xp.uint32)) * xp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * xp.uint32(0x846CA68B)
        totals.append((x ^ (x >> 16)).sum(dtype=xp.uint32))
    return xp.stack(totals).sum(dtype=xp.uint32)
