"""Bounds of one forward pass: after memory ran out, the bound for positions is half of the pass that did not fit.

Losses are divided by the denominators of the whole minibatch, and samples are drawn by their index in the rollout. So
these bounds change only memory and rounding; they are in no stage key.
"""

from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.work import Work


def with_limits(
    work: Work, *, microbatch_size: int | None = None, microbatch_tokens: int | None = None
) -> Work:
    """Return the work with these bounds; None: the recipe's."""
    given = {"microbatch_size": microbatch_size, "microbatch_tokens": microbatch_tokens}
    return work.model_copy(update={name: bound for name, bound in given.items() if bound is not None})


def remedy_for_memory(step: str, work: Work, *, rows: int | None, tokens: int | None) -> str:
    """Return the remedy if a pass of this many rows and positions does not fit and no smaller one is tried.

    Args:
        rows: rows of the pass; None: the stage reported none, as when memory ran out while it loaded a model.
    """
    elsewhere = "run fewer stages side by side (resources.cpus), or on a machine with more memory"
    if not isinstance(work, Stage) or rows is None:
        return elsewhere
    if rows == 1:
        return (
            f"one sequence or pair alone, a pass of {tokens} positions, does not fit: shorten "
            f"generation.max_response_tokens, {elsewhere}"
        )
    return f"set stages.{step}.microbatch_tokens below {tokens}, which changes no result; or {elsewhere}"
