"""How many sequences a stage has in one forward pass, and half of that: what is tried after memory ran out.

Losses are divided by the whole minibatch's denominators and samples drawn by their place in the rollout, so a
micro-batch decides memory and, but for rounding, nothing else; it is in no stage key.
"""

from collections.abc import Mapping

from schemas.kinds import KINDS
from schemas.recipe.work import Work
from schemas.records.artifacts import Artifact

TEST_ROWS = "test_rows"
"""The metric that says how many prompts a dataset has set apart for evaluation."""


def rows_at_once(work: Work, inputs: Mapping[str, Artifact]) -> int | None:
    """Sequences (pairs, of preferences) that ``work`` holds in one pass; None where no micro-batch decides its memory.

    Without a ``microbatch_size`` that is the minibatch, of an evaluation every response, and a larger one than that
    changes nothing.

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
