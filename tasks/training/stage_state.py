"""The values that are saved in a stage's checkpoints beside weights and optimisers: one frozen dataclass for each kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

State = TypeVar("State")

ADDED_LATER: Mapping[str, Any] = {"added_later": True}
"""Metadata of a field that older checkpoints lack. It then gets its default, which must match the behaviour of older
versions."""


@dataclass(frozen=True)
class NoState:
    """State of a stage in which only weights and optimisers change."""


@dataclass(frozen=True)
class FirstResponses:
    """Responses of the policy that the stage started from, for a watch that compares two policies."""

    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    """Lengths in tokens, EOS included."""
    scores: tuple[float, ...] = ()
    """Scores by a reward that judges; empty where a model judges."""


@dataclass(frozen=True)
class WatchedSoFar:
    """Observations of a watch: its judge's best measurement, and the changes since."""

    judged: tuple[float, ...] = ()
    """The judge's score of each response at its best measurement."""
    rewards: tuple[float, ...] = ()
    """Rewards of these responses."""
    falls: int = 0
    """Measurements in a row at which the reward was above, and the judge's score below, that best measurement."""
    worse: int = 0
    """Measurements in a row at which the judge's score had fallen since then, whatever the reward did."""
    first: FirstResponses = field(default_factory=FirstResponses, metadata=ADDED_LATER)
    """Responses of the policy at the first measurement; empty if they are not compared, or an earlier version kept
    none."""
    agreement: tuple[float, ...] = field(default=(), metadata=ADDED_LATER)
    """The agreement of reward and judge at the first measurement: value, and low and high end of its 95 % interval. Empty if it is
    undefined, the judge compares policies, or an earlier version measured none."""


@dataclass(frozen=True)
class BestSoFar:
    """State of a stage that returns the weights that measured best."""

    best: float | None = None
    """Highest measurement; None before the first, and if that was undefined."""
    best_iteration: int = 0
    """Iterations done at this measurement."""
    validation_score: float | None = field(default=None, metadata=ADDED_LATER)
    """The reward's mean score at that measurement, if another judge made it."""
    watched: WatchedSoFar = field(default_factory=WatchedSoFar, metadata=ADDED_LATER)
    """Observations of the watch."""
    first_scores: tuple[float, ...] = field(default=(), metadata=ADDED_LATER)
    """Scores of the responses at the first measurement; empty if an earlier version kept none."""


def state_from_json(initial: State, saved: Mapping[str, Any], *, path: str) -> State:
    """Return a state like ``initial`` with the values of a later one, as ``dataclasses.asdict`` gave them.

    Raises:
        ValueError: a field is missing or unknown; the message names it as ``path.field``.
    """
    known = fields(cast(Any, initial))
    names = {each.name for each in known}
    added_later = {each.name for each in known if each.metadata == ADDED_LATER}
    if missing := sorted(names - added_later - saved.keys()):
        raise ValueError(f"{path}.{missing[0]} is missing")
    if unknown := sorted(saved.keys() - names):
        raise ValueError(f"{path}.{unknown[0]} is not expected")
    values = {}
    for name in names & saved.keys():
        before = getattr(initial, name)
        values[name] = (
            state_from_json(before, saved[name], path=f"{path}.{name}")
            if is_dataclass(before)
            else _like(before, saved[name])
        )
    return cast(State, replace(cast(Any, initial), **values))


def _like(before: object, saved: Any) -> Any:
    """Return a saved value in its original type: JSON has lists for tuples."""
    return tuple(saved) if isinstance(before, tuple) else saved
