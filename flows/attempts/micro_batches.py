"""The number of sequences in one forward pass, which is halved after memory ran out.

Losses are divided by the denominators of the whole minibatch, and samples are drawn by their index in the rollout. So
the size of a micro-batch changes memory and, except for rounding, nothing else; it is in no stage key.
"""

from collections.abc import Mapping

from schemas.kinds import KINDS
from schemas.recipe.work import Work
from schemas.records.artifacts import Artifact

TEST_ROWS = "test_rows"
"""Metric with the number of a dataset's prompts for evaluation."""


def rows_per_pass(work: Work, inputs: Mapping[str, Artifact]) -> int | None:
    """Sequences (or pairs) of ``work`` in one forward pass; None if it has no micro-batches.

    The default, and the largest useful ``microbatch_size``, is the minibatch, or all responses of an evaluation.

    Args:
        inputs: role → artifact that the work reads.
    """
    one_pass = KINDS[work.kind].one_pass
    if one_pass is None:
        return None
    asked: int | None = getattr(work, "microbatch_size", None)
    if one_pass == "test_responses":
        prompts = inputs["prompts"].metrics.get(TEST_ROWS)
        if prompts is None:
            return asked
        whole = int(prompts) * int(getattr(work, "samples_per_prompt", 1))
    else:
        whole = int(getattr(work, one_pass))
    return min(asked or whole, whole)


def with_microbatch_size(work: Work, size: int | None) -> Work:
    """The work with this ``microbatch_size``; None: the recipe's."""
    return work if size is None else work.model_copy(update={"microbatch_size": size})


def remedy_for_memory(step: str, rows: int | None) -> str:
    """What a user can do if ``rows`` sequences at once do not fit, and half of them is not tried."""
    elsewhere = "run fewer stages side by side (resources.cpus), or on a machine with more memory"
    if rows is None:
        return elsewhere
    if rows == 1:
        return f"not even one sequence at once fits: shorten generation.max_response_tokens, {elsewhere}"
    return f"set stages.{step}.microbatch_size below {rows}, which changes no result; or {elsewhere}"
