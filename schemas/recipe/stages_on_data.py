"""Recipe classes of the stages that train on demonstrations, preferences or collected responses: SFT, reward model, DPO."""

from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import (
    BelowHalf,
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
from vantage.schemas.recipe.rounds import NumRounds, Round
from vantage.schemas.recipe.stage import Training

TrainOn = Literal["all_responses", "last_response"]
PairLoss = Literal["dpo", "ipo", "simpo", "orpo"]
WITHOUT_REFERENCE: tuple[PairLoss, ...] = ("simpo", "orpo")
"""Losses on pairs that read no reference."""


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
    """The policy whose trunk training starts from: a stage, ``model``, or another of ``models``."""
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
    """DPO and its relatives: trains the policy on preference pairs, without a reward model (arXiv 2305.18290)."""

    kind: Literal["dpo"]
    init: Name
    """The policy that training starts from: a stage, or ``model``."""
    reference: Name | None = None
    """The policy that KL is measured against; None: ``init``. ``simpo`` and ``orpo`` read none, and refuse one."""
    data: Name | None = None
    """Preferences: a dataset, or a ``preference_collection`` stage."""
    rollouts: Name | None = Field(None, exclude_if=is_unset)
    """Instead of ``data``: a ``rollout_collection`` stage, of which each prompt's best response is preferred to its worst;
    a prompt whose responses all score the same gives no pair."""
    loss: PairLoss = Field("dpo", exclude_if=is_default("dpo"))
    """The loss that is minimised, by the gap h between the two responses of a pair (docs/preference_losses.md). ``dpo``: −log σ(β·h), h in log-probabilities
    against the reference. ``ipo``: (h − 1/(2β))², which has its minimum at a finite gap (arXiv 2310.12036). ``simpo``: −log σ(β·h − γ), h in
    mean log-probabilities per token, without a reference (arXiv 2405.14734). ``orpo``: the negative log-likelihood of the chosen
    response, and β times −log σ of the log odds ratio, without a reference (arXiv 2403.07691)."""
    beta: Positive = 0.1
    """β: strength of the KL constraint, per nat. ``ipo``: the paper's τ. ``simpo``: the scale of the reward; the paper has 2 to 10.
    ``orpo``: the weight λ of the odds ratio."""
    target_margin: NonNegative | None = Field(None, exclude_if=is_unset)
    """γ, the least gap in reward that ``simpo`` asks for; it needs one, half of ``beta`` is a good first value. No other loss reads it."""
    label_smoothing: BelowHalf = Field(0.0, exclude_if=is_default(0.0))
    """Probability that the two responses of a pair are labelled the wrong way round (conservative DPO). Read by ``dpo`` and ``simpo``."""
    length_normalised: Switch = Field(False, exclude_if=is_off)
    """Divide the log-probabilities of a response, the policy's and the reference's, by its number of tokens (length-normalised DPO,
    Tülu 3, arXiv 2411.15124). Read by ``dpo`` and ``ipo``; ``simpo`` and ``orpo`` always do. β is then 5 to 10 in place of 0.1."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Pairs in one optimiser step."""
    group_by_length: Switch = True
    """Batches of pairs of like length, in random order: less padding."""
    rounds: NumRounds | None = Field(None, exclude_if=is_unset)
    """Iterative DPO: collect and train several times, each time from the policy of the round before. ``data`` (or ``rollouts``) names
    the stage that collects, whose ``policy`` is this stage's ``init``. When the recipe is loaded, each round becomes two stages of its own
    (``pairs_1``, ``dpo_1``, ``pairs_2`` …); the last has the names of the recipe. ``reference`` stays that policy in all rounds; None: each
    round's is the policy that it starts from. None: one round."""
    round: Round | None = Field(None, exclude_if=is_unset)
    """Place of this stage in its loop, as the loader writes it for ``rounds``. It changes no result and is in no stage key."""

    @property
    def reads_reference(self) -> bool:
        """Return whether the loss compares with a reference policy."""
        return self.loss not in WITHOUT_REFERENCE

    @rule
    def _no_unread_reference(self) -> None:
        if self.reference is not None and not self.reads_reference:
            raise ValueError(
                f"reference={self.reference} is not read by loss={self.loss}, which compares with no other policy; leave reference "
                "out, or use loss: dpo or ipo"
            )

    @rule
    def _a_target_margin_for_simpo(self) -> None:
        if self.loss == "simpo" and self.target_margin is None:
            raise ValueError(
                f"target_margin is missing, and loss=simpo asks for a gap of at least that; set it to about half of beta, "
                f"target_margin: {0.5 * self.beta:g}"
            )
        if self.loss != "simpo" and self.target_margin is not None:
            raise ValueError(
                f"target_margin={self.target_margin:g} is read by loss: simpo alone, and loss={self.loss}; leave target_margin "
                "out, or use loss: simpo"
            )

    @rule
    def _smoothed_where_it_is_logistic(self) -> None:
        if self.label_smoothing and self.loss not in ("dpo", "simpo"):
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} is read by loss: dpo or simpo, and loss={self.loss}; leave label_smoothing "
                "out, or use loss: dpo or simpo"
            )

    @rule
    def _normalised_once(self) -> None:
        if self.length_normalised and not self.reads_reference:
            raise ValueError(
                f"length_normalised=true is what loss={self.loss} does in any case; leave length_normalised out"
            )

    @rule
    def _pairs_or_responses(self) -> None:
        if (self.data is None) == (self.rollouts is None):
            raise ValueError("DPO learns either data (pairs) or rollouts; give exactly one of them")
