"""Measure the seconds of each phase of a step: each phase that a stage reports lasts until the next one.

A GPU works asynchronously, so the last operations of a phase may count for the next phase, in which Python waits for
them.
"""

import time
from collections import defaultdict
from collections.abc import Callable

from vantage.schemas.metric_names import PHASES

OTHER = "other"
MEASURING = ": "
"""Part of the names of phases of a measurement: ``validation: sampling``."""
_GROUPS = {
    "sampling": "sampling",
    "waiting for responses": "waiting",
    "waiting for verifiers": "waiting",
    "waiting for judges": "waiting",
    "waiting for the teacher": "waiting",
    "waiting for servers": "waiting",
    "giving weights to servers": "waiting",
    "giving weights to vLLM": "sampling",
    "scoring": "scoring",
    "asking the judge": "scoring",
    "updating": "updating",
}
"""Phase → the group whose seconds a step reports. Other phases read given responses with a network."""


class PhaseSeconds:
    """Sums the seconds of each group of phases."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a step; ``clock`` returns seconds."""
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Reset the measurements, and begin again."""
        self._now, self._since = OTHER, self._clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, phase: str) -> None:
        """Begin a phase, or go on with it."""
        group = "measuring" if MEASURING in phase else _GROUPS.get(phase, "reading")
        if group != self._now:
            self._count()
            self._now = group

    def beside(self, seconds: float) -> None:
        """Add seconds in which another thread sampled the responses of this step, beside the steps before."""
        self._seconds["beside"] += seconds

    def taken(self) -> dict[str, float]:
        """Return the metrics of the step that ends now, and begin the next one."""
        self._count()
        self._now = OTHER
        found = {f"seconds_{phase}": self._seconds[phase] for phase in PHASES}
        beside = {"seconds_beside": self._seconds["beside"]} if self._seconds["beside"] else {}
        share = self._seconds["waiting"] / max(sum(found.values()), 1e-9)
        self._seconds = defaultdict(float)
        return {**found, **beside, "waiting_share": share}

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._now] += now - self._since
        self._since = now


of_process = PhaseSeconds()
"""Seconds of this process's stage."""
