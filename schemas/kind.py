"""A kind of work: one row of the table in ``vantage.schemas.kinds``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from vantage.schemas.recipe.inputs import Content
from vantage.schemas.recipe.work import Work

ArtifactKind = Literal[
    "policy",
    "dataset",
    "row_check",
    "rollouts",
    "verifier",
    "benchmark",
    "reward_model",
    "value_model",
    "training_state",
    "answers",
    "evaluation",
]

MODELS: tuple[ArtifactKind, ...] = ("policy", "reward_model", "value_model")
"""Kinds of artifact that are models."""
TOKENIZED: tuple[ArtifactKind, ...] = (*MODELS, "rollouts")
"""Kinds of artifact that belong to a tokenizer: they read its ids, or hold them."""
PUBLISHED: tuple[ArtifactKind, ...] = ("policy", "reward_model")
"""Kinds of artifact that can become a registered model."""

Step = Literal["optimiser step", "iteration", "batch"]
"""Unit of a curve: an iteration is one rollout, and a batch is sampled without training on it."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row: a kind of work."""

    work: type[Work]
    """Its class in a recipe; the literal of its field ``kind`` is the kind's name."""
    resolved: type[Work] | None = None
    """Its class with all optional fields resolved; None: the same as ``work``."""
    module: str
    """Dotted name of its module in ``tasks``; the module's function ``run`` does the work."""
    makes: ArtifactKind
    content: Content | None = None
    """Content of the dataset that it makes; None: it makes none, or ``work.content`` names it."""
    revision: int
    """Part of every stage key; raised when the kind's numbers change (``tests/attempts/golden_digests.py`` asks)."""
    imports: str | None = None
    """Implicit steps only: the field whose ``source`` it copies into the store."""
    merges: bool = False
    """Implicit steps only: it makes a whole model of the adapters that it reads."""
    mixes: bool = False
    """Implicit steps only: it mixes the prepared datasets that it reads."""
    checks: bool = False
    """Implicit steps only: it checks the datasets that it reads, and no stage reads it."""
    reads: Mapping[str, tuple[ArtifactKind, ...]] = field(default_factory=dict)
    """Field that names a stage → kinds of artifact that are allowed there; the recipe's model is a policy."""
    other_models: tuple[str, ...] = ()
    """Fields that may name one of the recipe's other models: it is sampled from, compared with, or a reward model starts from it."""
    data: Mapping[str, Content] = field(default_factory=dict)
    """Field that names a dataset → the content that is read."""
    benchmarks: tuple[str, ...] = ()
    """Fields that name one of the recipe's folders of lm-eval tasks."""
    reference_from: str | None = None
    """Field that ``reference`` defaults to."""
    learning_rate: float | None = None
    """Published rate, at the width in ``vantage.schemas.recipe.learning_rates``; None: it trains nothing."""
    critic_learning_rate: float | None = None
    """Published rate for the critic of a policy stage."""
    estimates: tuple[str, ...] = ()
    """Headline metrics that are estimates over held-out prompts; each has an uncertainty."""
    numbers: tuple[str, ...] = ()
    """Its other headline metrics."""
    curves: tuple[str, ...] = ()
    """Metrics that it reports while it runs."""
    curves_by: Step = "optimiser step"
    """Unit of its curves."""
    workload: str | None = None
    """Dotted name of the function ``Subject -> Workload`` in ``vantage.estimates`` that counts its networks and passes; None: it
    is not estimated."""

    @property
    def name(self) -> str:
        """Return the kind's name in a recipe."""
        name: str = get_args(self.work.model_fields["kind"].annotation)[0]
        return name

    @property
    def resolved_type(self) -> type[Work]:
        """Return the kind's class with all optional fields resolved: the type of a job's work."""
        return self.resolved or self.work

    @property
    def is_implicit(self) -> bool:
        """Return whether it is an implicit step, which recipes do not contain."""
        return self.imports is not None or self.merges or self.mixes or self.checks

    @property
    def learns_from_samples(self) -> bool:
        """Return whether it trains a policy on the policy's own scored responses."""
        return self.makes == "policy" and self.curves_by == "iteration"

    @property
    def is_published(self) -> bool:
        """Return whether its model can become a registered model."""
        return self.makes in PUBLISHED and not self.is_implicit

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics that it reports once, at its end; gates can use them."""
        return (*self.estimates, *self.numbers)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the fields that name a stage, a dataset or a benchmark."""
        return (*self.reads, *self.data, *self.benchmarks)
