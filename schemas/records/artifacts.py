"""Artifacts, the inputs and outputs of stages: one frozen type per kind."""

from typing import Annotated, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_default, is_off, is_unset
from vantage.schemas.recipe.inputs import Content
from vantage.schemas.records.firings import EndedEarly, Firing
from vantage.schemas.records.uncertainty import Uncertainty

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""sha256 in lower-case hexadecimal."""


class StoredArtifact(Frozen):
    """Fields of every artifact: its location, content and inputs."""

    uri: str
    """The object's folder, relative to the store (``objects/<digest>``)."""
    digest: Digest
    """Content digest: sha256 of the object's manifest, which lists every file with size and sha256."""
    files_digest: Digest | None = None
    """sha256 of the manifest without ``metrics.json``: equal if two artifacts hold the same model or rows, whatever
    their metrics. None: written by an earlier version."""
    stage_key: Digest
    parents: dict[str, Digest]
    """Role (``init``, ``data``, ``reward.main.0`` …) → content digest of the input."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Headline metrics; None is a metric that is undefined for this stage's data."""
    uncertainty: dict[str, Uncertainty] = Field(default_factory=dict)
    """Metric → its uncertainty, for the estimates over held-out prompts."""
    firings: tuple[Firing, ...] = Field((), exclude_if=is_default(()))
    """The firings of the guards of the stage that made it."""
    ended_early: EndedEarly | None = Field(None, exclude_if=is_unset)
    """Details of a stage that ended before its last step; None: it did all steps."""

    @property
    def stands_for(self) -> Digest:
        """Return the artifact's digest, or the digest of a model with exactly the same content."""
        return self.digest


def is_same(one: StoredArtifact, other: StoredArtifact) -> bool:
    """Return whether two artifacts hold the same files: the same weights and tokenizer, or the same rows.

    Adapters that change nothing are the same as their base model.
    """
    if one.files_digest is not None and one.files_digest == other.files_digest:
        return True
    return one.stands_for == other.stands_for and one.digest != other.digest


class Dataset(StoredArtifact):
    """Validated, split rows in Parquet, one file a split."""

    kind: Literal["dataset"] = "dataset"
    content: Content


class StoredModel(StoredArtifact):
    """Fields of every model."""

    tokenizer_digest: Digest
    base: Digest | None = Field(None, exclude_if=is_unset)
    """Content digest of the base model of these adapters (LoRA); it is among the parents. None: this is a whole
    model."""
    same_as_base: bool = Field(False, exclude_if=is_off)
    """Whether the adapters change nothing: they are unchanged since before the first step."""

    @property
    def stands_for(self) -> Digest:
        """Return the model's digest, or that of the base model if the adapters change nothing."""
        return self.base if self.base is not None and self.same_as_base else self.digest


class PolicyCheckpoint(StoredModel):
    """A causal language model with its tokenizer: a plain Hugging Face folder, or adapters as peft reads them."""

    kind: Literal["policy"] = "policy"


class RewardModel(StoredModel):
    """A scalar score of a whole response."""

    kind: Literal["reward_model"] = "reward_model"


class ValueModel(StoredModel):
    """A scalar value of every prefix of a response."""

    kind: Literal["value_model"] = "value_model"


class RowCheck(StoredArtifact):
    """Result of reading the rows of all datasets with the model's tokenizer and chat template."""

    kind: Literal["row_check"] = "row_check"


class RolloutsArtifact(StoredArtifact):
    """Responses of a policy as ids, with the sampler's log-probabilities and their scores, one file a split."""

    kind: Literal["rollouts"] = "rollouts"
    tokenizer_digest: Digest


class VerifierArtifact(StoredArtifact):
    """A rule that decides whether a response is right: its configuration and, if it is a user's own, its file."""

    kind: Literal["verifier"] = "verifier"


class BenchmarkArtifact(StoredArtifact):
    """Definitions of lm-eval's tasks with their data, copied from a user's folder."""

    kind: Literal["benchmark"] = "benchmark"


class TrainingState(StoredArtifact):
    """Training state that a stage has left beside its model, from which a longer stage goes on: checkpoint and
    curves."""

    kind: Literal["training_state"] = "training_state"


class StoredAnswers(StoredArtifact):
    """Answers of judges and reward servers that a stage has left beside its result, each with its question."""

    kind: Literal["answers"] = "answers"


class Evaluation(StoredArtifact):
    """Measurements of a model: responses with their judgements, or tables."""

    kind: Literal["evaluation"] = "evaluation"


Artifact = Annotated[
    Dataset
    | RowCheck
    | RolloutsArtifact
    | PolicyCheckpoint
    | RewardModel
    | ValueModel
    | VerifierArtifact
    | BenchmarkArtifact
    | TrainingState
    | StoredAnswers
    | Evaluation,
    Field(discriminator="kind"),
]
