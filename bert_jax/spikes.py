"""Losses that stand out from those of the steps before.

A loss is a spike if it is more than 6 deviations above the median of the last 100. The
deviation is 1.4826 times the median distance from the median (that of a normal
distribution; a few spikes among the hundred do not move it), at least 1 % of the
median. Nothing is called a spike before 30 losses are known. A spike is remembered as
any other loss, so a level that stays is usual after 50 steps; a loss that is no number
is not. The steps of each task of each stage are compared among themselves.

    config.spike=say    it is said
    config.spike=stop   it ends the run
    config.spike=skip   it is said, and the update of its step is left out

`say` and `stop` are of the loop. It knows a loss when the update of its step has been
applied and two more steps are on their way, and after a resume it counts anew.

`skip` is of the step itself (step.py), which finds what is usual, in what the state
remembers of each lane, before it applies anything. That is in every checkpoint, so a
run that was killed skips the steps that it would have skipped; and the loss is that of
the whole batch, so all hosts decide alike. What is said goes by the step's own verdict.
A run that goes on from a checkpoint of another `spike` begins to remember there, and
says so.

It is batches that `skip` is for. The loss of a step is that of the parameters before
it: where these went wrong all steps stand out, and are left out until the new level is
usual. To go around such a spike as PaLM did (Chowdhery et al. 2022, arXiv:2204.02311,
section 5.1): `spike=stop`, then another --workdir with `init` of this one and another
`seed`, which draws other batches; moments and schedule begin anew there. What bounds
the damage of any step is `optim.clip`.
"""

from collections import defaultdict
from collections.abc import Hashable

import numpy as np

WINDOW, FEWEST = 100, 30
DEVIATIONS = 6.0


def nothing_known(lanes: int) -> np.ndarray:
    """[lanes, WINDOW]: what a run remembers when it begins."""
    return np.full((lanes, WINDOW), np.nan, np.float32)


def judge(known, loss, xp=np):
    """What is usual of the losses `known` [WINDOW], the newest last and NaN where there
    was none, and whether `loss` stands out from it; NaN and False while they are few.

    On the host and on the device, in float32. No product is added to anything, so no
    compiler can round the two at once, and both come to the same verdict.
    """
    count = (~xp.isnan(known)).sum()

    def median(values):
        ordered = xp.sort(values)  # NaN last
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2

    usual = xp.where(count < FEWEST, xp.float32(xp.nan), median(known))
    deviation = 1.4826 * median(xp.abs(known - usual))
    most = DEVIATIONS * xp.maximum(deviation, 0.01 * xp.abs(usual))
    return usual, loss - usual > most


def remember(known, loss, xp=np):
    """The losses with one more, without the oldest."""
    return xp.append(known[1:], loss)


class Spikes:
    """What the loop remembers, of each lane by itself."""

    def __init__(self):
        self.known = defaultdict(lambda: nothing_known(1)[0])

    def usual(self, lane: Hashable, loss: float) -> float | None:
        """The median that a loss stands out from, or None if it does not. The loss is
        remembered."""
        loss = np.float32(loss)
        usual, stands_out = judge(self.known[lane], loss)
        self.known[lane] = remember(self.known[lane], loss)
        return float(usual) if stands_out else None
