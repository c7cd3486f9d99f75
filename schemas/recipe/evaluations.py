"""The kinds of stage that only measure: a policy against another one, and a reward model."""

from typing import Literal

from pydantic import Field

from schemas.frozen import rule
from schemas.recipe.fields import Count, Name, is_unset
from schemas.recipe.rewards import Judge
from schemas.recipe.stage import Stage


class PolicyEvaluation(Stage):
    """Comparison of a candidate with a baseline on the test prompts (docs/evaluation.md)."""

    kind: Literal["evaluation"]
    candidate: Name
    """The policy to evaluate: a stage, ``model``, or another of ``models``."""
    baseline: Name
    """The policy to compare it with."""
    judge: Judge
    """The judge of the responses."""
    also: Judge | None = Field(None, exclude_if=is_unset)
    """A second judge of the same responses, of another kind than ``judge``: a verifier, a reward, or a model."""
    prompts: Name
    """The dataset whose test prompts are used."""
    demonstrations: Name | None = Field(None, exclude_if=is_unset)
    """A dataset of demonstrations, on whose test rows the perplexity of both policies is measured."""
    samples_per_prompt: Count = 1
    """Responses of each policy to each prompt."""
    microbatch_size: Count | None = None
    """Responses sampled or scored at once; None: all."""

    @rule
    def _judges_of_two_kinds(self) -> None:
        if self.also is None:
            return
        if self.judge.kind == self.also.kind:
            raise ValueError(
                f"judge and also are both {self.judge.kind}s, whose metrics would have the same names; "
                "name two of different kinds (a verifier, a reward, a model), or add a second evaluation stage"
            )


class RewardEvaluation(Stage):
    """A reward model on test pairs: accuracy by subgroup, and whether its probabilities can be believed."""

    kind: Literal["reward_evaluation"]
    reward_model: Name
    """The reward model to evaluate."""
    data: Name
    """Preference pairs, whose test rows are used: a dataset, or a ``preference_collection`` stage. Where it has the column
    ``subgroup``, each of them is measured on its own too."""
    batch_size: Count = 64
    """Pairs scored at once."""
    microbatch_size: Count | None = None
    """Pairs scored at once where memory runs out; changes nothing else. None: ``batch_size``."""
