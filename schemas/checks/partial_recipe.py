"""A recipe of which parts may be invalid, typed for the checks of its names; parts with another shape are left out.

Fields that hold no text name nothing. pydantic refuses the parts that are left out here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vantage.schemas.kind import Kind
from vantage.schemas.problems import Path
from vantage.schemas.recipe.sources import Builtin, FileSource, file_source
from vantage.schemas.records.metric import Settings
from vantage.schemas.steps import CONTENT_COLUMNS


@dataclass(frozen=True, kw_only=True)
class PartialData:
    """A dataset."""

    source: str | None
    columns: tuple[str, ...]
    """Columns of ours that it maps."""
    has_columns: bool
    """Whether ``columns`` has any value."""
    is_test_set: bool
    """Whether all of its rows are test rows."""
    held_out_of: tuple[tuple[Path, str], ...]
    """(Path, other dataset) for each name in ``near_duplicates.held_out_of``."""

    @property
    def origin(self) -> FileSource | None:
        """Return what ``source`` names."""
        return None if self.source is None else file_source(self.source)

    @property
    def builtin_content(self) -> str | None:
        """Return the content of a built-in dataset; None: it is another source."""
        content = self.origin.kind if isinstance(self.origin, Builtin) else None
        return content if content in CONTENT_COLUMNS else None


@dataclass(frozen=True, kw_only=True)
class PartialTerm:
    """A term of a reward."""

    path: Path
    reward_models: Mapping[str, str]
    """Field → the stage that it names."""
    verifiers: Mapping[str, str]
    """Field → the verifier that it names."""
    judging_model: str | None = None
    """Value of ``judge.model``, if no server has that model."""


@dataclass(frozen=True, kw_only=True)
class PartialJudge:
    """A judge of responses."""

    path: Path
    verifier: str | None
    reward: str | None
    model: str | None


@dataclass(frozen=True, kw_only=True)
class PartialGate:
    """A gate of a stage."""

    path: Path
    metric: str
    has_confidence: bool


@dataclass(frozen=True, kw_only=True)
class PartialStage:
    """A stage."""

    kind: Kind | None
    """The row of its kind; None: it has no kind, or an unknown one."""
    texts: Mapping[str, str]
    """Field → its text, for the fields that hold one."""
    judges: Mapping[str, PartialJudge]
    """Field → judge, for the fields of ``vantage.schemas.steps.JUDGES`` that are there."""
    positive_verifier: str | None
    """Value of ``algorithm.positive_verifier``."""
    gates: tuple[PartialGate, ...]
    """The gates that name a metric."""
    has_gate: bool
    """Whether anything is written as ``gate``."""
    member_of: str | None
    """The stage with ``members`` that it was written out of."""
    settings: Settings | None
    """Settings of an evaluation, on which its metrics depend."""


@dataclass(frozen=True, kw_only=True)
class PartialPublication:
    """An item of ``publish``."""

    stage: str | None
    after: str | None
    registered_model: str | None
    alias: str | None


@dataclass(frozen=True, kw_only=True)
class PartialRecipe:
    """The sections whose items have names or name others."""

    models: Mapping[str, str | None] = field(default_factory=dict)
    """Other model → the stage that replaces it (``otherwise``)."""
    data: Mapping[str, PartialData] = field(default_factory=dict)
    mixtures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Mixture → its parts."""
    verifiers: Mapping[str, str | None] = field(default_factory=dict)
    """Own verifier → its source."""
    benchmarks: tuple[str, ...] = ()
    rewards: Mapping[str, tuple[PartialTerm, ...]] = field(default_factory=dict)
    stages: Mapping[str, PartialStage] = field(default_factory=dict)
    publish: tuple[PartialPublication, ...] = ()
    licenses: tuple[str, ...] = ()
    """Steps for which a licence is given."""
    datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dataset or mixture → the datasets that its rows come from."""
