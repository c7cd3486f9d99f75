"""How many sequences a stage has in one forward pass, and half of that: what is tried after memory ran out.

Losses are divided by the whole minibatch's denominators and samples drawn by their place in the rollout, so a
micro-batch decides memory and, but for rounding, nothing else; it is in no stage key.
"""

from collections.abc import Mapping

from schemas.recipe.stages import (
    DirectPreferenceOptimization,
    PolicyEvaluation,
    PreferenceCollection,
    RewardModelling,
    Rollouts,
    SupervisedFineTuning,
)
from schemas.records.artifacts import Artifact
from schemas.records.job import Work

TEST_ROWS = "test_rows"
"""The metric that says how many prompts a dataset has set apart for evaluation."""


def rows_at_once(work: Work, inputs: Mapping[str, Artifact]) -> int | None:
    """Sequences (pairs, of preferences) that ``work`` holds in one pass; None where no micro-batch decides its memory.

    Without a ``microbatch_size`` that is the minibatch, of an evaluation every response, and a larger one than that
    changes nothing.

    Args:
        inputs: role → artifact that the work reads.
    """
    match work:
        case Rollouts():
            whole = work.minibatch_size
        case SupervisedFineTuning() | RewardModelling() | DirectPreferenceOptimization():
            whole = work.batch_size
        case PreferenceCollection():
            whole = work.batch_size
        case PolicyEvaluation():
            prompts = inputs["prompts"].metrics.get(TEST_ROWS)
            if prompts is None:
                return work.microbatch_size
            whole = int(prompts) * work.samples_per_prompt
        case _:
            return None
    return min(work.microbatch_size or whole, whole)


def in_micro_batches(work: Work, size: int | None) -> Work:
    """The work in micro-batches of ``size``; None: as the recipe says."""
    return work if size is None else work.model_copy(update={"microbatch_size": size})


def remedy_for_memory(step: str, rows: int | None) -> str:
    """What a person can do when ``rows`` sequences at once do not fit and half of them is not tried."""
    elsewhere = "run fewer stages side by side (resources.cpus), or on a machine with more memory"
    if rows is None:
        return elsewhere
    if rows == 1:
        return f"not even one sequence at once fits: shorten generation.max_response_tokens, {elsewhere}"
    return f"set stages.{step}.microbatch_size below {rows}, which changes no result; or {elsewhere}"
