"""Recipe classes of the stages that train on demonstrations, preferences or collected responses: SFT, reward model, DPO."""

from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import (
    Count,
    Name,
    NonNegative,
    Positive,
    Switch,
    is_default,
    is_off,
    is_unset,
)
from vantage.schemas.recipe.inputs import MODEL
from vantage.schemas.recipe.members import Member, MembersOrCount
from vantage.schemas.recipe.stage import Training

TrainOn = Literal["all_responses", "last_response"]


class SupervisedFineTuning(Training):
    """Next-token training on demonstrations."""

    kind: Literal["sft"]
    init: Name = MODEL
    """The policy that training starts from: a stage, or ``model``."""
    data: Name
    """A dataset of demonstrations."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Demonstrations in one optimiser step."""
    group_by_length: Switch = True
    """Batches of demonstrations of like length, in random order: less padding."""
    packing: Switch = Field(False, exclude_if=is_off)
    """Compute several short demonstrations side by side in one row, up to the longest of the batch, in place of padding; each
    attends to itself alone, so results are the same up to rounding. A batch has as many demonstrations as without;
    ``microbatch_size`` counts rows. It saves time where ``group_by_length`` is false. Not for models that count positions by
    themselves (BLOOM)."""
    train_on: TrainOn = Field("all_responses", exclude_if=is_default("all_responses"))
    """Turns of a conversation that are learnt: all of the assistant's, or only its last response. Turns of others are
    never trained on. The conversation up to the last response fits ``generation.max_prompt_tokens``, or the row is left
    out."""


class RewardModelling(Training):
    """Bradley-Terry training of a scalar head on preference pairs, or on rankings of several responses."""

    kind: Literal["reward_model"]
    init: Name
    """The policy whose trunk training starts from: a stage, or ``model``."""
    data: Name | None = None
    """Preference pairs: a dataset, or a ``preference_collection`` stage."""
    rankings: Name | None = None
    """Instead of ``data``: a dataset of prompts with several ranked responses each."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Pairs (prompts, of rankings) in one optimiser step."""
    centre_coef: NonNegative = 0.0
    """Weight of (chosen + rejected)², which keeps scores around 0 (arXiv 2312.09244)."""
    lm_coef: NonNegative = 0.0
    """Weight of the NLL of chosen responses, which preserves language modelling (MOSS, arXiv 2401.06080 eq. 2)."""
    group_by_length: Switch = True
    """Batches of pairs of like length, in random order: less padding."""
    centre_on: Name | None = None
    """A dataset of demonstrations; after training, scores are shifted so that their mean on it is 0."""
    members: MembersOrCount | None = Field(None, exclude_if=is_unset)
    """Train several reward models in place of one, for a reward with ``ensemble``: a number, or a mapping of ``count`` and ``by``. When
    the recipe is loaded, each becomes a stage of its own (``NAME_1``, ``NAME_2`` …), and a reward's term ``{model: NAME}`` becomes a
    term for each. None: one."""
    half: Count | None = Field(None, exclude_if=is_unset)
    """Train on half of the training prompts. 1 and 2 are the halves of one division of the prompts, 3 and 4 those of another, and so
    on; the held-out rows are whole. None: all prompts."""
    member: Member | None = Field(None, exclude_if=is_unset)
    """Ensemble and member that this stage is, as the loader writes it for ``members``. It changes no result and is in no stage key."""

    @rule
    def _members_are_not_divided_again(self) -> None:
        given = [name for name in ("half", "member") if getattr(self, name) is not None]
        if self.members is not None and given:
            raise ValueError(
                f"{given[0]} is what members gives each of the {self.members.count} stages that it becomes; leave {given[0]} out"
            )

    @rule
    def _pairs_or_rankings(self) -> None:
        if (self.data is None) == (self.rankings is None):
            raise ValueError(
                "a reward model learns either data (pairs) or rankings; give exactly one of them"
            )
        if self.rankings is not None and (self.lm_coef or self.centre_coef):
            raise ValueError(
                f"lm_coef={self.lm_coef:g} and centre_coef={self.centre_coef:g} are about pairs; "
                "with rankings set both to 0"
            )


class DirectPreferenceOptimization(Training):
    """DPO: trains the policy on preference pairs, without a reward model (arXiv 2305.18290)."""

    kind: Literal["dpo"]
    init: Name
    """The policy that training starts from: a stage, or ``model``."""
    reference: Name | None = None
    """The policy that KL is measured against; None: ``init``."""
    data: Name | None = None
    """Preferences: a dataset, or a ``preference_collection`` stage."""
    rollouts: Name | None = Field(None, exclude_if=is_unset)
    """Instead of ``data``: a ``rollout_collection`` stage, of which each prompt's best response is preferred to its worst;
    a prompt whose responses all score the same gives no pair."""
    beta: Positive = 0.1
    """β: strength of the KL constraint, per nat."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Pairs in one optimiser step."""
    group_by_length: Switch = True
    """Batches of pairs of like length, in random order: less padding."""

    @rule
    def _pairs_or_responses(self) -> None:
        if (self.data is None) == (self.rollouts is None):
            raise ValueError("DPO learns either data (pairs) or rollouts; give exactly one of them")
