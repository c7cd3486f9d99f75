"""The diagnosis of a pretrained critic on responses to test prompts: a file of its artifact."""

from collections.abc import Mapping
from math import isfinite, nan
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.records.uncertainty import Uncertainty, interval_of

CONFIDENCE = 0.95
"""Confidence of all intervals of the diagnosis."""
DIAGNOSIS_FILE = "diagnosis.json"
WORST_PROMPTS = 10
"""Most prompts that are listed."""
PROMPT_CHARACTERS = 300
"""Length at which prompts are cut off."""

_Count = Annotated[int, Field(ge=1)]


class Estimated(Uncertainty):
    """A measured number with its uncertainty."""

    METRIC: ClassVar[str] = "value_bias"
    """A metric whose interval is computed in the same way."""

    value: float | None
    """The number; None where it is undefined, as explained variance is where returns do not vary."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Two-sided interval at 95 %; None for a single prompt and for an undefined number."""
        if self.value is None:
            return None
        return interval_of(self.METRIC, self.value, self, confidence=CONFIDENCE)


class _EstimatedExplained(Estimated):
    METRIC: ClassVar[str] = "explained_variance"


class _EstimatedRatio(Estimated):
    METRIC: ClassVar[str] = "squared_advantage_ratio"


class _EstimatedCorrelation(Estimated):
    METRIC: ClassVar[str] = "rank_correlation"


def _read_as(kind: type[Estimated]) -> BeforeValidator:
    def read(given: object) -> Estimated:
        return kind.model_validate(given.model_dump() if isinstance(given, Estimated) else given)

    return BeforeValidator(read)


Explained = Annotated[Estimated, _read_as(_EstimatedExplained)]
"""An explained variance, with its interval."""
Ratio = Annotated[Estimated, _read_as(_EstimatedRatio)]
"""A ratio of mean squares, with its interval."""
Correlation = Annotated[Estimated, _read_as(_EstimatedCorrelation)]
"""A rank correlation, with its interval."""


class DiagnosedSlice(Frozen):
    """One part of the tokens, and how well the critic predicts their returns."""

    label: str
    """A tenth of the response (``1`` to ``10``), a number of tokens (``8-15``, ``65536+``) or a difficulty (``hardest``)."""
    explained_variance: Explained
    bias: Estimated
    """Mean of value − return."""
    tokens: _Count


class Calibration(Frozen):
    """One tenth of the tokens, by their values."""

    value: float
    """Mean value of the tokens."""
    returned: Estimated
    """Mean return of the tokens; for a calibrated critic it equals ``value``."""
    error: Estimated
    """Mean of value − return."""
    tokens: _Count


class Ordering(Frozen):
    """Order of the responses to one prompt by value, compared with their order by return, at some fraction of their length."""

    at: Annotated[float, Field(ge=0.0, le=1.0)]
    """Fraction of the length: 0.5 is half-way."""
    correlation: Correlation
    """(Pairs in the right order − pairs in the wrong one) / pairs of different returns. These pairs are its rows."""


class DiagnosedAdvantages(Frozen):
    """Mean square of return − baseline over the same tokens."""

    critic: Estimated
    batch_mean: Estimated
    others_mean: Estimated | None
    """Mean of the other responses to the same prompt, as in RLOO; None where a prompt has a single response."""
    ratio: Ratio | None
    """critic / batch mean; None where all returns are equal."""


class DiagnosedPrompt(Frozen):
    """A prompt on which the critic has a large error."""

    prompt: str
    responses: _Count
    value: float
    returned: float
    squared_error: Annotated[float, Field(ge=0.0)]
    """Mean over tokens."""
    share: Annotated[float, Field(ge=0.0, le=1.0)]
    """Share of the squared error of all prompts."""


class CriticDiagnosis(Frozen):
    """The content of ``diagnosis.json``."""

    version: Literal[1] = 1
    prompts: _Count
    responses: _Count
    tokens: _Count
    return_mean: float
    return_variance: Annotated[float, Field(ge=0.0)]
    explained_variance: Explained
    between_prompts: Explained
    within_prompts: Explained | None
    """Explained variance within prompts that have several responses; None where each prompt has one."""
    bias: Estimated
    by_tenth: tuple[DiagnosedSlice, ...]
    by_tokens_left: tuple[DiagnosedSlice, ...]
    by_length: tuple[DiagnosedSlice, ...]
    by_difficulty: tuple[DiagnosedSlice, ...]
    """Thirds of the responses, in the order of the mean return of the other responses to the same prompt; empty where each
    prompt has one response."""
    calibration: tuple[Calibration, ...]
    calibration_error: Annotated[float, Field(ge=0.0)]
    """Mean over tokens of their part's absolute error; noise alone makes it positive."""
    orderings: tuple[Ordering, ...]
    """Empty where no two responses to a prompt have different returns."""
    advantages: DiagnosedAdvantages
    worst_prompts: tuple[DiagnosedPrompt, ...]
    """Prompts with the largest squared error."""
    iterations: _Count
    """Most iterations that the stage could train."""
    best_iteration: Annotated[int, Field(ge=0)]
    """Iteration whose critic was kept."""


class PretrainedCritic(Frozen):
    """The diagnosis of a value stage's critic."""

    step: str
    diagnosis: CriticDiagnosis


class DriftPoint(Frozen):
    """A critic in one iteration of a policy stage; None: not measured."""

    iteration: int
    explained_variance: float | None = None
    critic_weight: float | None = None
    """Weight of the critic in the advantages; 1 without a switch that weighs it."""
    value_bias: float | None = None
    value_loss: float | None = None


DRIFT_CURVES = ("explained_variance", "critic_weight", "value_bias", "value_loss")
"""Metrics of a policy stage that are fields of a point."""


def drift_points(curves: Mapping[int, Mapping[str, float]]) -> tuple[DriftPoint, ...]:
    """Return the points of curves by iteration and metric, in order; values that are not finite count as not measured."""
    return tuple(
        DriftPoint(
            iteration=iteration,
            **{
                name: curves[iteration][name]
                for name in DRIFT_CURVES
                if isfinite(curves[iteration].get(name, nan))
            },
        )
        for iteration in sorted(curves)
    )


class CriticDrift(Frozen):
    """A critic over the iterations of a policy stage."""

    step: str
    points: tuple[DriftPoint, ...]
    is_switched: bool
    """Whether ``critic_ev_threshold`` or ``critic_blend`` weighs the critic."""
    is_running: bool = False
