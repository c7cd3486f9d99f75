"""A term that is lower for longer responses."""

from torch import Tensor

from vantage.algorithms.length_penalties import linear_penalty, relative_penalty
from vantage.algorithms.rewards import overlong_penalty
from vantage.schemas.recipe.terms import LengthPenalty
from vantage.tasks.rewards.term_scores import Responses, Source, TermScores


def load(term: LengthPenalty, source: Source) -> TermScores:
    """Return the penalty as a function of responses."""
    limit = term.limit or source.job.generation.max_response_tokens

    def scores(given: Responses) -> Tensor:
        lengths = given.sequences.lengths.to(given.device)
        if term.length == "relative":
            return relative_penalty(lengths, given.cases()).float()
        if term.length == "linear":
            return linear_penalty(lengths, limit=limit).float()
        assert term.buffer is not None  # the recipe class refuses a term without it
        return overlong_penalty(lengths, max_length=limit, buffer=max(1, round(term.buffer * limit))).float()

    return scores
