"""The kinds of stage that only measure: a policy against another one or on lm-eval's tasks, and a reward model."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import Count, Name, Switch, is_default, is_unset
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.recipe.rollout import Sampling, refuse_misplaced_engine
from vantage.schemas.recipe.stage import Stage


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
    critic: Name | None = Field(None, exclude_if=is_unset)
    """A value_pretraining stage, whose critic reads the responses that are shown token by token: its value of each token
    is shown in the report beside the token's log-probability. It changes no metric. Its tokenizer must be that of both
    policies."""
    samples_per_prompt: Count = 1
    """Responses of each policy to each prompt."""
    rollout: Sampling = Field(Sampling(), exclude_if=is_default(Sampling()))
    """Settings of sampling."""

    @rule
    def _one_process_samples_with_vllm(self) -> None:
        refuse_misplaced_engine(self.rollout, self.resources)

    @rule
    def _judges_of_two_kinds(self) -> None:
        if self.also is None:
            return
        if self.judge.kind == self.also.kind:
            raise ValueError(
                f"judge and also are both {self.judge.kind}s, whose metrics would have the same names; "
                "name two of different kinds (a verifier, a reward, a model), or add a second evaluation stage"
            )


class BenchmarkEvaluation(Stage):
    """A policy on a task of lm-eval, from local files (docs/evaluation.md); needs the package ``lm_eval``."""

    kind: Literal["benchmark_evaluation"]
    policy: Name
    """The policy to measure: a stage, ``model``, or another of ``models``."""
    benchmark: Name
    """The folder of tasks, one of ``benchmarks``."""
    task: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """The name of a task in the folder, or of a group of tasks with a rule for averaging its numbers."""
    metric: Annotated[str, StringConstraints(pattern=r"^[^,\s]+(,[^,\s]+)?$", max_length=200)] = "acc"
    """The task's metric that becomes ``benchmark_score``, by its name in lm-eval: ``acc_norm``, ``exact_match`` …; with several
    filters ``exact_match,strict-match``."""
    chat_template: Switch = False
    """Ask by the tokenizer's chat template, examples before the question as turns. Published numbers of most tasks are
    without."""
    batch_size: Count = 16
    """Texts in one forward pass."""

    @rule
    def _one_process_measures(self) -> None:
        if not self.resources.is_one_process:
            raise ValueError(
                "a benchmark_evaluation runs in one process, on one device; leave resources.nodes out, and set resources.gpus and "
                "resources.distributed.ranks to 1 at most"
            )


class RewardEvaluation(Stage):
    """A reward model on test pairs: accuracy by subgroup, and whether its probabilities can be believed."""

    kind: Literal["reward_evaluation"]
    reward_model: Name
    """The reward model to evaluate: a stage that trained one, or one of ``models``."""
    data: Name
    """Preference pairs, whose test rows are used: a dataset, or a ``preference_collection`` stage. Where it has the column
    ``subgroup``, each of them is measured on its own too."""
    batch_size: Count = 64
    """Pairs scored at once."""
