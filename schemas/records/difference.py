"""Differences between two runs, stages, models or recipes: the record that ``vantage diff`` prints."""

from typing import Any, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen

SideKind = Literal["run", "stage", "model", "recipe"]
Sharing = Literal[
    "shared", "differs", "not_reproduced", "unfinished", "neither", "unknown", "only_a", "only_b"
]
"""``shared``: the same key and the same artifact. ``differs``: different keys. ``not_reproduced``: the same key and different
artifacts. ``unfinished``: the same key, and one side has no artifact. ``neither``: not computed on either side, and no
different keys are known. ``unknown``: the key of one side is not known."""

Interval = tuple[float, float]


class ComparedSide(Frozen):
    """One of the two things that are compared."""

    named: str
    """Name as it was given."""
    kind: SideKind
    recipe: str
    """The recipe's name."""
    run_id: str | None = None
    status: str | None = None
    """Status of the run."""
    stage: str | None = None
    """Stage, for a side that is a stage or a model; its inputs and the evaluations of it are also compared."""
    digest: str | None = None
    """Content digest of the stage's artifact."""


class FieldDifference(Frozen):
    """A value that differs."""

    field: str
    a: Any = None
    b: Any = None
    only: Literal["a", "b"] | None = None
    """The only side that has the field; None: both have it."""


class StageDifference(Frozen):
    """A step of one side, with the step of the other side that it is compared with."""

    step: str
    """Name in A; in B if A has no such step."""
    step_b: str | None = None
    """Name in B, if it is another one."""
    sharing: Sharing
    digest_a: str | None = None
    digest_b: str | None = None
    reasons: tuple[str, ...] = ()
    """Parts of the key that differ, one line each."""


class DataDifference(Frozen):
    """Rows of one split of a dataset, compared by their content; a row that occurs twice counts twice."""

    step: str
    split: str
    rows_a: int
    rows_b: int
    added: int
    """Number of rows of B that A does not have."""
    removed: int
    """Number of rows of A that B does not have."""
    examples_added: tuple[dict[str, str], ...] = ()
    """First of these rows: column → text, shortened."""
    examples_removed: tuple[dict[str, str], ...] = ()


class ProvenanceDifference(Frozen):
    """A part of the provenance that differs, with the steps at which it differs."""

    part: str
    a: str | None
    b: str | None
    steps: tuple[str, ...]


class GateDifference(Frozen):
    """A gate that one side lacks, or whose threshold or verdict differs."""

    step: str
    metric: str
    a: str | None
    """Verdict, or the threshold where there is no verdict; None: there is no such gate."""
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
    """Two-sided interval of A's metric at 95 %."""
    interval_b: Interval | None = None
    standard_error_a: float | None = None
    standard_error_b: float | None = None
    difference: float | None = None
    """B − A."""
    interval: Interval | None = None
    """Interval of the difference, at 95 %."""
    standard_error: float | None = None
    """Standard error of the difference."""
    paired: bool = False
    """Whether the error is that of differences at the same prompts, clustered by prompt. If not, the two sides were treated as
    independent, and the interval is too wide where they share prompts."""
    n: int | None = None
    """Number of prompts of a paired difference."""

    @property
    def is_clear(self) -> bool:
        """Return whether the interval of the difference excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


class Difference(Frozen):
    """Everything that differs between A and B."""

    a: ComparedSide
    b: ComparedSide
    recipe: tuple[FieldDifference, ...] = ()
    """Fields that differ, after every default is filled in."""
    stages: tuple[StageDifference, ...] = ()
    """All steps, including the shared ones."""
    expected: bool = False
    """Whether one side is a recipe: its steps are then compared by the inputs of their keys, and nothing else can be
    compared."""
    data: tuple[DataDifference, ...] = ()
    """Splits whose rows differ."""
    provenance: tuple[ProvenanceDifference, ...] = ()
    libraries: tuple[FieldDifference, ...] = ()
    """Distributions with different versions, where both environments were recorded."""
    gates: tuple[GateDifference, ...] = ()
    metrics: tuple[MetricDifference, ...] = ()
    """Metrics of steps that are not shared, including equal ones."""
    notes: tuple[str, ...] = Field(())
    """Comparisons that were not possible, with the reason."""

    @property
    def is_same(self) -> bool:
        """Return whether nothing differs."""
        stages = all(stage.sharing in ("shared", "neither") for stage in self.stages)
        found = (self.recipe, self.data, self.provenance, self.libraries, self.gates)
        return stages and not any(found)
