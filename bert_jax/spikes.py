"""Losses that stand out from those of the steps before.

A loss is a spike if it is more than 6 deviations above the median of the last 100. The
deviation is 1.4826 times the median distance from the median (that of a normal
distribution; a few spikes among the hundred do not move it), at least 1 % of the
median. Nothing is called a spike before 30 losses are known; after a resume they are
counted anew. Steps that train something else, as tasks do, are compared among
themselves.

A spike is said, or ends the run; there is no `skip`. A loss is known when the update of
its step has been applied and two more steps are on their way; and what is usual would
have to be kept in every checkpoint, one for each task, or a run that was killed would
skip other steps than one that was not. What bounds the damage of a step is
`optim.clip`, and `nonfinite=skip` leaves out a gradient that is no number. To go
around a spike as PaLM did (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1):
`spike=stop`, then another --workdir with `init` of this one and another `seed`, which
draws other batches; moments and schedule begin anew there.
"""

from collections import defaultdict, deque
from collections.abc import Hashable

import numpy as np

WINDOW, FEWEST = 100, 30
DEVIATIONS = 6.0


class Spikes:
    def __init__(self):
        self.before = defaultdict(lambda: deque(maxlen=WINDOW))

    def usual(self, kind: Hashable, loss: float) -> float | None:
        """The median that a loss stands out from, or None if it does not. The loss is
        remembered."""
        known = self.before[kind]
        losses = np.array(known)
        known.append(loss)
        if len(losses) < FEWEST:
            return None
        median = float(np.median(losses))
        deviation = 1.4826 * float(np.median(np.abs(losses - median)))
        top = median + DEVIATIONS * max(deviation, 0.01 * abs(median))
        return median if loss > top else None
