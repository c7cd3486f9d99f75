"""What differs between two runs, stages, models or recipes: the record that ``vantage diff`` prints."""

from typing import Any, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen

SideKind = Literal["run", "stage", "model", "recipe"]
Sharing = Literal[
    "shared", "differs", "not_reproduced", "unfinished", "neither", "unknown", "only_a", "only_b"
]
"""``shared``: the same key and the same artifact. ``differs``: other keys. ``not_reproduced``: the same key, and another
artifact. ``unfinished``: the same key, and one has no artifact. ``neither``: not computed on either side, for which no other key is
known. ``unknown``: the key of one is not known."""

Interval = tuple[float, float]


class ComparedSide(Frozen):
    """One of the two things that are compared."""

    named: str
    """As it was given."""
    kind: SideKind
    recipe: str
    """The recipe's name."""
    run_id: str | None = None
    status: str | None = None
    """Of the run."""
    stage: str | None = None
    """Of a stage or a model; its inputs and what measured it are compared with it."""
    digest: str | None = None
    """Content digest of the stage's artifact."""


class FieldDifference(Frozen):
    """A value that differs."""

    field: str
    a: Any = None
    b: Any = None
    only: Literal["a", "b"] | None = None
    """Which side has the field at all; None: both."""


class StageDifference(Frozen):
    """A step of one side, and that of the other which it is compared with."""

    step: str
    """Its name in A; in B where A has none."""
    step_b: str | None = None
    """Its name in B, if that is another one."""
    sharing: Sharing
    digest_a: str | None = None
    digest_b: str | None = None
    reasons: tuple[str, ...] = ()
    """Parts of the key that differ, one line each."""


class DataDifference(Frozen):
    """Rows of one split of a dataset, compared by their content; a row that is there twice counts twice."""

    step: str
    split: str
    rows_a: int
    rows_b: int
    added: int
    """Rows of B that A does not have."""
    removed: int
    """Rows of A that B does not have."""
    examples_added: tuple[dict[str, str], ...] = ()
    """Column → text, shortened; the first of them."""
    examples_removed: tuple[dict[str, str], ...] = ()


class ProvenanceDifference(Frozen):
    """A part of the provenance that differs, with the stages at which it does."""

    part: str
    a: str | None
    b: str | None
    steps: tuple[str, ...]


class GateDifference(Frozen):
    """A gate that one side does not have, or whose threshold or verdict differs."""

    step: str
    metric: str
    a: str | None
    """The verdict, or the threshold where there is no verdict; None: no such gate."""
    b: str | None
    threshold_differs: bool
    passed_a: bool | None = None
    passed_b: bool | None = None


class MetricDifference(Frozen):
    """A metric of both sides."""

    step: str
    metric: str
    a: float | None
    b: float | None
    interval_a: Interval | None = None
    """Two-sided, at 95 %."""
    interval_b: Interval | None = None
    standard_error_a: float | None = None
    standard_error_b: float | None = None
    difference: float | None = None
    """B − A."""
    interval: Interval | None = None
    """Of the difference, at 95 %."""
    standard_error: float | None = None
    """Of the difference."""
    paired: bool = False
    """Whether the error is that of differences at the same prompts, clustered by prompt. Else the two were taken as
    independent, which is too wide where they share prompts."""
    n: int | None = None
    """Prompts of a paired difference."""

    @property
    def is_clear(self) -> bool:
        """Return whether the interval of the difference excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


class Difference(Frozen):
    """Everything that differs between A and B."""

    a: ComparedSide
    b: ComparedSide
    recipe: tuple[FieldDifference, ...] = ()
    """Fields with every default filled in."""
    stages: tuple[StageDifference, ...] = ()
    """All steps, the shared ones too."""
    expected: bool = False
    """One side is a recipe: its stages are compared by what their keys depend on, and nothing else can be compared."""
    data: tuple[DataDifference, ...] = ()
    """Splits whose rows differ."""
    provenance: tuple[ProvenanceDifference, ...] = ()
    libraries: tuple[FieldDifference, ...] = ()
    """Distribution → version, where both environments were recorded."""
    gates: tuple[GateDifference, ...] = ()
    metrics: tuple[MetricDifference, ...] = ()
    """Of steps that are not shared, those that are equal too."""
    notes: tuple[str, ...] = Field(())
    """What could not be compared, and why."""

    @property
    def is_same(self) -> bool:
        """Return whether nothing differs."""
        stages = all(stage.sharing in ("shared", "neither") for stage in self.stages)
        found = (self.recipe, self.data, self.provenance, self.libraries, self.gates)
        return stages and not any(found)
