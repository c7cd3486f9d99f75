"""The ends of a response's steps, for terms that score each of them."""

from typing import Annotated, Literal

from pydantic import StringConstraints

from vantage.schemas.frozen import Frozen, rule

Marker = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class StepEnds(Frozen):
    """The ends of a response's steps: each place where the marker is complete, and the end of the response."""

    text: Marker | None = None
    """Text that ends a step, for example a line break."""
    token: Marker | None = None
    """Token that ends a step, as the tokenizer writes it."""
    total: Literal["mean", "sum"] = "mean"
    """The response's score: the mean of its steps' scores, or their sum, which favours many steps."""

    @rule
    def _one_of_two(self) -> None:
        if (self.text is None) == (self.token is None):
            raise ValueError("step_ends takes either text or token; give exactly one of them")
