"""The content of a run's report, as plain values: nothing here reads or draws."""

from dataclasses import dataclass, field
from typing import Literal

from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.records.alarms import Alarm
from vantage.schemas.records.conclusions import Conclusion, Judged
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.facts import Facts
from vantage.schemas.records.verdicts import Verdict

Point = tuple[int, float]
"""Step and value."""


@dataclass(frozen=True)
class Step:
    """A stage or an implicit step of the run."""

    name: str
    kind: str
    status: str
    """Status in ``run.json``; a run that no process executes has no running step."""
    digest: str | None
    seconds: float
    """Wall time of the last attempt in this run; 0 if it was reused."""
    reads: tuple[tuple[str, str], ...]
    """Pairs of role and step."""
    outcome: str
    """Headline metrics, or the reason why it did not run."""
    made_by: str | None = None
    """The run that made a reused artifact."""
    is_implicit: bool = False


@dataclass(frozen=True)
class Publication:
    """A model that the recipe publishes."""

    step: str
    model: str
    """``NAME`` or ``NAME@ALIAS``, from the record."""
    result: str
    """Result in words."""
    is_published: bool


@dataclass(frozen=True)
class Gate:
    """A gate, and the measured value."""

    step: str
    verdict: Verdict | None
    """Verdict; None: the gate was not reached."""
    asks: str
    """``pair_accuracy >= 0.75``."""
    on_fail: str
    meaning: str
    """Meaning of the gate's metric."""


@dataclass(frozen=True)
class Curve:
    """A metric over the steps of a stage."""

    metric: str
    unit: str
    meaning: str
    points: tuple[Point, ...]
    """Points in the order of steps; of a long curve only some (``vantage.review.reports.curves``)."""
    total: int
    """Number of points before some were left out."""
    undefined: int = 0
    """Number of points that are left out because they are not finite."""
    trend: tuple[Point, ...] = ()
    """Trend of a long curve: the mean of each equal part, at the mean of its steps."""
    fired: tuple[int, ...] = ()
    """Steps after which a guard on this metric fired."""
    band: tuple[tuple[int, float, float], ...] = ()
    """Step, 10th and 90th percentile of the graded score whose mean this is."""


@dataclass(frozen=True)
class Ridge:
    """Spread of a set of scores, as its percentiles show it."""

    name: str
    """Name of what was scored; for a validation its iteration."""
    points: tuple[tuple[float, float], ...]
    """Share of the responses, and the score that so many do not exceed; in the order of the shares."""
    kind: Literal["data", "before", "iteration"]

    @property
    def median(self) -> float | None:
        """The score that half of the responses do not exceed; None: it was not reported."""
        return dict(self.points).get(0.5)


@dataclass(frozen=True)
class PhaseTime:
    """The time of one group of phases in a stage's iterations."""

    phase: str
    seconds: float
    """Mean of the iterations."""
    share: float
    """Mean share of an iteration's time."""
    low: float
    """10th percentile of the share over the iterations."""
    high: float
    """90th percentile."""


@dataclass(frozen=True)
class Times:
    """The time of a stage's iterations, by phase."""

    phases: tuple[PhaseTime, ...]
    """The phases that took any time, in their order."""
    iterations: int
    seconds: float
    """Mean of an iteration."""
    beside: float | None
    """Mean seconds in which responses were sampled beside training; None: none were."""
    bars: tuple[tuple[str, tuple[float, ...]], ...]
    """Iterations, and mean seconds of each of ``phases`` in them."""


@dataclass(frozen=True)
class StageCurves:
    """The learning curves of a training stage."""

    step: str
    kind: str
    by: str
    """Unit of a step: ``optimiser step``, ``iteration`` or ``batch``."""
    curves: tuple[Curve, ...]
    others: tuple[str, ...] = ()
    """Metrics whose curves are not drawn."""
    made_by: str | None = None
    """The run that made a reused artifact, whose curves these are."""
    ridges: tuple[Ridge, ...] = ()
    """Percentiles of the scores of the validation responses; empty: it measures none."""
    times: Times | None = None
    """Seconds of the parts of an iteration; None: the stage does not sample, or an earlier version computed it."""
    rollout: Sampling | None = None
    """The engine that samples its responses; None: it samples none."""


@dataclass(frozen=True)
class Distribution:
    """Distribution of a number over both models' responses."""

    what: str
    edges: tuple[float, ...]
    """Ends of the bins, one more than bins; for a number with few values, those values instead."""
    is_discrete: bool
    baseline: tuple[int, ...]
    """Responses in each bin."""
    candidate: tuple[int, ...]
    baseline_mean: float
    candidate_mean: float


@dataclass(frozen=True)
class Token:
    """A token of a sampled response."""

    text: str
    logprob: float
    """The token's log-probability in nats, under the distribution that it was drawn from."""
    value: float | None = None
    """The critic's value before it saw the token; None: no critic read it."""


@dataclass(frozen=True)
class Answer:
    """One model's response to a prompt."""

    text: str
    judgements: tuple[tuple[str, float], ...]
    ended: bool
    tokens: tuple[Token, ...] = ()
    """Tokens of the response; empty: they were not recorded."""
    more_tokens: int = 0
    """Tokens beyond those that were recorded."""


@dataclass(frozen=True)
class Sample:
    """A prompt with both models' first responses."""

    prompt: str
    baseline: Answer
    candidate: Answer


@dataclass(frozen=True)
class Comparison:
    """An evaluation of a candidate against a baseline."""

    step: str
    candidate: str
    baseline: str
    summary: str
    responses: int
    """Number of responses of each model that the distributions use."""
    distributions: tuple[Distribution, ...] = ()
    samples: tuple[Sample, ...] = ()
    critic: str | None = None
    """The step whose critic read the samples; None: none did."""
    missing: tuple[str, ...] = ()
    """Parts that are not shown, with the reason."""


@dataclass(frozen=True)
class Measured:
    """A headline metric of a stage."""

    step: str
    metric: str
    value: float | None
    interval: tuple[float, float] | None
    """95 % confidence interval."""
    n: int | None
    unit: str
    meaning: str


@dataclass(frozen=True)
class Cost:
    """Cost of a step in this run."""

    step: str
    attempts: int
    seconds: float
    """Wall time of the last attempt."""
    all_seconds: float
    """Wall time of all attempts of this run; an attempt whose process died counts up to its last recorded measurement."""
    gpus: int
    device: str
    tokens: float | None
    """Estimated number of tokens: measured speed at each step × time since the previous step. None: the step measures no
    speed."""
    padding: float | None
    """Mean share of padding in the passes."""
    energy: Energy | None = None
    """Energy of the attempts that measured it, together; None: none did."""
    measured_attempts: int = 0
    """Number of attempts that measured their energy."""
    facts: Facts = field(default_factory=dict)
    """Facts of the last attempt."""


@dataclass(frozen=True)
class Remark:
    """A remark on a step for the reader."""

    step: str
    text: str
    level: str
    """``warning``, ``note`` or ``bad``."""


@dataclass(frozen=True)
class ModelFact:
    """A model that a decision is about."""

    step: str
    registered: str | None
    """Name of the registered model; None: the run has not published it."""
    version: str | None
    """Version of the registered model; None: it is not recorded."""
    digest: str | None


@dataclass(frozen=True)
class Decision:
    """The facts of the first screen, for a person who decides."""

    conclusion: Conclusion
    judged: tuple[Judged, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    models: tuple[ModelFact, ...] = ()
    task: tuple[str, ...] = ()
    """The question of each evaluation, a sentence each."""
    author: str = "unknown"
    began: str = "unknown"
    """Time of the first opening, in UTC."""
    ended: str = "unknown"
    approvals: tuple[tuple[str, str], ...] = ()
    """(Subject of the question, answer)."""
    waiting: tuple[str, ...] = ()
    """Subjects of questions without an answer."""


@dataclass(frozen=True)
class Report:
    """All parts of the report, in the order in which they are shown."""

    run_id: str
    recipe: str
    source: str
    overrides: tuple[str, ...]
    status: str
    started: str
    openings: int
    steps: tuple[Step, ...]
    decision: Decision | None = None
    """The conclusion of the first screen; None: it could not be gathered."""
    next_steps: tuple[str, ...] = ()
    loosened: tuple[tuple[str, str], ...] = ()
    """(Step, gate that closed in an earlier run and that this run has made less strict)."""
    publications: tuple[Publication, ...] = ()
    gates: tuple[Gate, ...] = ()
    curves: tuple[StageCurves, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    measured: tuple[Measured, ...] = ()
    costs: tuple[Cost, ...] = ()
    environment: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = ()
    """Part → (value, steps that have it)."""
    code: tuple[tuple[str, str], ...] = ()
    """Step → digest of the code that it ran."""
    origin: tuple[tuple[str, str], ...] = ()
    remarks: tuple[Remark, ...] = ()
    missing: tuple[str, ...] = field(default_factory=tuple)
    """Sections that could not be made, with the reason."""
