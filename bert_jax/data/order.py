"""Which row comes when: sample n of a run is row `order(n)`, for any n at once.

Sample n belongs to step n // batch. An epoch shows every row once, in another order:
its blocks of neighbouring rows are shuffled and laid end to end, and slot s of the
batch walks through a stretch of its own, 1 / batch of that line. So the rows of a batch
come from places spread over the whole corpus, whatever its size, and yet each slot
reads its text block by block. Which process feeds a slot makes no difference.

    blocks shuffled    | 7 7 7 7 | 2 2 2 2 | 9 9 9 9 | 0 0 0 0 | ...
    walked by slot     | 0 0 0 0   0 0 | 1 1   1 1 1 1 | 2 2 2 2 ...

Where a corpus was made of several inputs (languages), an epoch may take more of one and
less of another: p ** alpha instead of its share p of the rows, going on in the next
epoch where it stopped.

The part of a block in one slot's stretch is a read: its text is fetched in one piece
and its rows are shuffled once more. A block is 64 kB of text, less in a small corpus,
where each slot is to see several places in an epoch.
"""

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import numpy as np

DIRECTIONS = ("forward", "both")  # of a stream
PLACES = 8  # that a slot sees in an epoch at least, if there are rows enough


class Read(NamedTuple):
    """Rows first..last, which one slot goes through in an order of its own."""

    epoch: int
    first: int
    last: int
    at: int = 0  # its place on the line: a small input may come twice an epoch
    back: bool = False  # gone through from its last row to its first


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
    blocks: np.ndarray  # [blocks + 1], row at which each begins
    batch: int
    seed: int
    shuffled: bool = True  # or the natural order, in every slot
    inputs: np.ndarray | None = None  # [blocks], number of the input each is from
    alpha: float = 1.0  # an input with a share p of the rows gets p ** alpha

    @property
    def rows(self) -> int:
        return int(self.blocks[-1])

    def __call__(self, sample: int, *, back: bool = False) -> tuple[Read, int]:
        """The read that a sample belongs to, and its place in it.

        `back` is for a slot that walks its stretch from the end to the beginning.
        """
        epoch, place = divmod(sample, self.rows)
        at, slot = divmod(place, self.batch)
        each, more = divmod(self.rows, self.batch)  # the first slots get one more
        begin = slot * each + min(slot, more)
        end = begin + each + (slot < more)
        place = end - 1 - at if back else begin + at
        line, starts = self.line(epoch)
        k = int(np.searchsorted(starts, place, side="right")) - 1
        low, high = max(begin, int(starts[k])), min(end, int(starts[k + 1]))
        first = int(line[k, 0]) - int(starts[k])
        return Read(epoch, first + low, first + high, low, back), place - low

    @property
    def together(self) -> int:
        """Rows of one place, at the most."""
        return max(1, self.rows // (PLACES * self.batch))

    def line(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Stretches of rows in the order of an epoch, and where each begins on it."""
        return _line(self, epoch if self.shuffled else 0)

    def rows_of(self, read: Read) -> np.ndarray:
        """The rows of a read in the order in which they come."""
        rows = np.arange(read.first, read.last)
        if self.shuffled:
            key = [self.seed, *(int(part) for part in read)]
            return np.random.default_rng(key).permutation(rows)
        return rows


@lru_cache(maxsize=8)
def _line(order: Order, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    stretches = np.stack([order.blocks[:-1], order.blocks[1:]], 1)
    if order.shuffled:
        inputs = order.inputs
        if inputs is None:
            inputs = np.zeros(len(stretches), np.int32)
        parts = -(-(stretches[:, 1] - stretches[:, 0]) // order.together)
        inputs = np.repeat(inputs, parts)
        stretches = split(stretches, parts, order.together)
        sizes = np.bincount(inputs, stretches[:, 1] - stretches[:, 0]).astype(int)
        counts = share(sizes, order.alpha)
        stretches = np.concatenate(
            [
                endless(stretches[inputs == n], epoch * count, (epoch + 1) * count, key)
                for n, count in enumerate(counts)
                for key in [[order.seed, 1, n]]
            ]
        )
        rng = np.random.default_rng([order.seed, 0, epoch])
        stretches = stretches[rng.permutation(len(stretches))]
    sizes = stretches[:, 1] - stretches[:, 0]
    return stretches, np.concatenate([[0], np.cumsum(sizes)])


def split(stretches: np.ndarray, parts: np.ndarray, most: int) -> np.ndarray:
    """Each stretch in so many parts of at most `most` rows."""
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    first = np.repeat(stretches[:, 0], parts) + number * most
    last = np.minimum(first + most, np.repeat(stretches[:, 1], parts))
    return np.stack([first, last], 1)


def share(sizes: np.ndarray, alpha: float) -> np.ndarray:
    """Rows an epoch takes of each input, as many in all: q ~ p ** alpha.

    alpha = 1 takes all of every input once, alpha = 0 as much of each; 0.7 is what
    multilingual BERT was trained with, 0.3 XLM-R (arXiv:1911.02116).
    """
    total = sizes.sum()
    if alpha == 1:
        return sizes
    wanted = np.where(sizes > 0, (sizes / total) ** alpha, 0.0)
    wanted *= total / wanted.sum()
    counts = np.floor(wanted).astype(int)
    largest = np.argsort(counts - wanted, kind="stable")  # remainders
    counts[largest[: total - counts.sum()]] += 1
    return counts


def endless(stretches: np.ndarray, begin: int, end: int, key: list[int]) -> np.ndarray:
    """Rows begin..end of an input that is gone through again and again.

    Each time in another order: no row comes a third time before all came twice.
    """
    sizes = stretches[:, 1] - stretches[:, 0]
    total, found = int(sizes.sum()), [np.empty((0, 2), stretches.dtype)]
    while begin < end:
        turn = begin // total
        order = np.random.default_rng([*key, turn]).permutation(len(stretches))
        starts = turn * total + np.concatenate([[0], np.cumsum(sizes[order])])
        low = np.maximum(begin - starts[:-1], 0)
        high = np.minimum(end - starts[:-1], sizes[order])
        part = stretches[order, :1] + np.stack([low, high], 1)
        found.append(part[high > low])
        begin = min(end, (turn + 1) * total)
    return np.concatenate(found)
