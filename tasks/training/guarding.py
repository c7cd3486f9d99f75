"""Follow the guards of a running stage: a pure function of its metric journal, so a resumed stage sees the same."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from vantage.algorithms.guards import is_outside
from vantage.ledger.journal import Entry
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.records.firings import EndedEarly, Firing

FIRINGS_KEPT = 5
"""Number of a guard's first firings that are recorded; a guard that always fires must not fill the record."""


ENDING_ACTIONS = ("restore_best", "finish")
"""Actions that end a stage with an artifact. The first ends it at once; the second may do one more step."""


@dataclass(frozen=True)
class Asked:
    """Requests of the guards, or of a person, to the stage's loop."""

    stop: bool = False
    end: bool = False
    finish: bool = False
    freeze_policy: bool = False


class Guarding:
    """Watches the curves that the guards name."""

    def __init__(
        self, guards: Iterable[Guard], journal: Iterable[Entry] = (), *, defaults: Collection[Guard] = ()
    ) -> None:
        """Begin with the metrics that the journal contains already.

        Args:
            guards: all guards of the stage.
            journal: measurements of an earlier attempt, up to the checkpoint.
            defaults: those of ``guards`` that come from defaults and not from the recipe.
        """
        self._guards, self._defaults = tuple(guards), frozenset(defaults)
        longest: Counter[str] = Counter()
        for guard in self._guards:
            longest[guard.metric] = max(longest[guard.metric], 2 * guard.over)
        self._values = {metric: deque[float](maxlen=count) for metric, count in longest.items()}
        self._outside: set[Guard] = set()
        self._fired: Counter[Guard] = Counter()
        self._recorded: list[Firing] = []
        for entry in journal:
            self.observe(entry.step, entry.metrics)

    @property
    def firings(self) -> tuple[Firing, ...]:
        """The recorded firings, in order."""
        return tuple(self._recorded)

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> list[Firing]:
        """Read a step's metrics, and return the guards that fire at it.

        A guard fires when its curve leaves the bound, and again only after the curve has come back.

        Args:
            step: steps done.
            metrics: metrics of the step; an undefined or infinite value counts as not reported.
        """
        reported = {
            name for name in self._values if (value := metrics.get(name)) is not None and isfinite(value)
        }
        for name in reported:
            self._values[name].append(float(metrics[name] or 0.0))
        return [
            firing
            for guard in self._guards
            if guard.metric in reported and (firing := self._look(guard, step)) is not None
        ]

    def asked(self) -> Asked:
        """Return the requests of the guards that have fired."""
        actions = {guard.action for guard in self._fired}
        return Asked(
            stop="stop" in actions,
            end="restore_best" in actions,
            finish="finish" in actions,
            freeze_policy=any(guard.action == "freeze_policy" for guard in self._outside),
        )

    def has_seen(self, metric: str) -> bool:
        """Return whether a guarded metric was ever reported."""
        return bool(self._values.get(metric))

    def first(self, *actions: str) -> Firing | None:
        """Return the first firing of a guard with one of these actions."""
        return next((each for each in self._recorded if each.guard.action in actions), None)

    def ending(self, *, before: int) -> Firing | None:
        """Return the firing that ended the stage, of those before a step; at one step, ``restore_best`` overrules ``finish``."""
        ends = [each for each in self._recorded if each.guard.action in ENDING_ACTIONS and each.step < before]
        return min(ends, key=lambda each: (each.step, ENDING_ACTIONS.index(each.guard.action)), default=None)

    def _look(self, guard: Guard, step: int) -> Firing | None:
        values = tuple(self._values[guard.metric])
        is_beyond = is_outside(
            values, guard.relation, guard.amount, over=guard.over, is_relative=guard.is_relative
        )
        if not is_beyond:
            self._outside.discard(guard)
            return None
        if guard in self._outside:
            return None
        self._outside.add(guard)
        self._fired[guard] += 1
        looked_at = guard.over if guard.relation in ("above", "below") else 2 * guard.over
        firing = Firing(
            guard=guard, step=step, values=values[-looked_at:], is_default=guard in self._defaults
        )
        if self._fired[guard] <= FIRINGS_KEPT:
            self._recorded.append(firing)
        return firing


def ended_early(
    guarding: Guarding, *, by_hand: str | None, step: int, total: int, was_announced: bool
) -> EndedEarly | None:
    """Return the reason why a stage ended after ``step`` of ``total``; None: it did not end early.

    Args:
        by_hand: the reason that a person gave; None: nobody asked.
        was_announced: whether the step was known to be the last before it began, so that the reason came before it. A
            guard
            that fires at such a step ends nothing: without the person, the stage would have gone on to a later step.
    """
    if step >= total:
        return None
    firing = guarding.ending(before=step if was_announced else step + 1)
    if firing is not None:
        return EndedEarly(step=step, total=total, by="guard", reason=firing.guard.metric)
    return None if by_hand is None else EndedEarly(step=step, total=total, by="hand", reason=by_hand)
