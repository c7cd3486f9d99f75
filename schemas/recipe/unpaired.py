"""Recipe class of the stage that trains on single responses, each labelled desirable or not: KTO."""

from typing import Literal

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import Count, Name, Positive, Switch
from vantage.schemas.recipe.stage import Training


class KahnemanTverskyOptimization(Training):
    """KTO: trains the policy on single responses that are desirable or not, without pairs (arXiv 2402.01306)."""

    kind: Literal["kto"]
    init: Name
    """The policy that training starts from: a stage, or ``model``."""
    reference: Name | None = None
    """The policy that KL is measured against; None: ``init``."""
    data: Name
    """A dataset of labelled responses: ``prompt``, ``response`` and ``label`` (true: desirable)."""
    beta: Positive = 0.1
    """β: strength of the KL constraint, per nat."""
    desirable_weight: Positive = 1.0
    """λ_D: weight of desirable responses. Its product with their number should be 1 to 4/3 times that of the others."""
    undesirable_weight: Positive = 1.0
    """λ_U: weight of undesirable responses."""
    epochs: Positive = 1.0
    """Passes over the data; may be a fraction."""
    batch_size: Count = 64
    """Responses in one optimiser step, and for the estimate of the KL: two or more."""
    group_by_length: Switch = True
    """Batches of responses of like length, in random order: less padding."""

    @rule
    def _a_batch_has_mismatched_pairs(self) -> None:
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size={self.batch_size} leaves no response to another prompt, by which the KL is estimated; use 2 or more"
            )
