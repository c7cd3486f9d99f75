"""Recipe classes of the stages that sample from a policy without training: collected responses, and pairs made of them."""

from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import (
    Count,
    Name,
    is_default,
    is_unset,
)
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.recipe.rollout import Sampling, refuse_misplaced_engine
from vantage.schemas.recipe.rounds import Round
from vantage.schemas.recipe.stage import Precision, Stage


class RolloutCollection(Stage):
    """Responses sampled from a policy and scored once, for stages that read them instead of sampling.

    Value pretraining, best-of-n, DPO and baselines that are made beforehand may read them as often as they like."""

    kind: Literal["rollout_collection"]
    policy: Name
    """The policy to sample from: a stage, or ``model``."""
    prompts: Name
    """The dataset of prompts; all its splits are sampled."""
    reward: Name
    """The reward that scores the responses."""
    samples_per_prompt: Count = 1
    """Responses to each training prompt."""
    held_out_samples_per_prompt: Count | None = None
    """Responses to each validation or test prompt; None: as many as to a training prompt."""
    batch_size: Count = 256
    """Responses in one batch; a finished batch is saved."""
    precision: Precision = "float32"
    """Type of the arithmetic (autocast) in sampling; also the type of the reward's models. Log-probabilities are those of
    this arithmetic: a stage that trains on them should have the same. ``auto``: bfloat16 where ``resources.gpus`` is 1 or more,
    else float32."""
    rollout: Sampling = Field(Sampling(), exclude_if=is_default(Sampling()))
    """Settings of sampling."""
    round: Round | None = Field(None, exclude_if=is_unset)
    """Place of this stage in a loop, as the loader writes it for ``rounds`` of a ``dpo`` stage. It is in no stage key."""

    @rule
    def _one_process_samples_with_vllm(self) -> None:
        refuse_misplaced_engine(self.rollout, self.resources)


class PreferenceCollection(Stage):
    """Pairs sampled from a policy: a dataset of preferences for a reward model or DPO.

    With ``prompts``: the best of the policy's responses against the worst, as ``judge`` scores them; a prompt whose
    responses all score the same gives no pair. With ``demonstrations``: each one against the policy's own response.
    """

    kind: Literal["preference_collection"]
    policy: Name
    """The policy to sample from: a stage, ``model``, or another of ``models``."""
    prompts: Name | None = None
    """The dataset of prompts."""
    demonstrations: Name | None = None
    """A dataset of demonstrations, each of which is preferred to the policy's response."""
    judge: Judge | None = None
    """The judge of the responses. A model compares two in both orders; where the orders disagree there is no pair."""
    samples_per_prompt: Count | None = None
    """Responses to each prompt; None: 2 with a judge, 1 against a demonstration."""
    batch_size: Count = 256
    """Responses in one batch; a finished batch is saved."""
    rollout: Sampling = Field(Sampling(), exclude_if=is_default(Sampling()))
    """Settings of sampling."""
    round: Round | None = Field(None, exclude_if=is_unset)
    """Place of this stage in a loop, as the loader writes it for ``rounds`` of a ``dpo`` stage. It is in no stage key."""

    @rule
    def _one_process_samples_with_vllm(self) -> None:
        refuse_misplaced_engine(self.rollout, self.resources)

    @rule
    def _prompts_with_judge_or_demonstrations(self) -> None:
        if (self.prompts is None) == (self.demonstrations is None):
            raise ValueError("pairs are made on either prompts or demonstrations; give exactly one of them")
        if (self.prompts is None) != (self.judge is None):
            raise ValueError(
                "a judge chooses among responses to prompts, and is not asked about demonstrations; "
                + ("add judge" if self.judge is None else "remove judge")
            )
        if self.judge is not None and self.samples_per_prompt == 1:
            raise ValueError("samples_per_prompt=1 leaves a judge nothing to choose among; use 2 or more")

    @rule
    def _a_model_compares_two_responses(self) -> None:
        is_model = self.judge is not None and self.judge.kind == "model"
        if is_model and self.samples_per_prompt not in (None, 2):
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt}, but a model as judge compares two responses; use 2, or name a "
                "verifier or a reward"
            )
