"""Keep the weights that a stage returns: the best on validation prompts, not the last."""

import logging
from dataclasses import replace
from typing import TypeVar

from torch import nn

from vantage.tasks.training import ranks
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.measured import defined
from vantage.tasks.training.networks import weights_of
from vantage.tasks.training.stage_state import BestSoFar

Best = TypeVar("Best", bound=BestSoFar)

log = logging.getLogger(__name__)


def keep_if_best(
    attempt: Attempt[Best], module: nn.Module, measured: float, *, metric: str, iteration: int
) -> bool:
    """Remember the module's weights if ``measured`` is above all earlier measurements; returns whether it is.

    Args:
        metric: name of the measurement; higher is better.
        iteration: iterations done.
    """
    measured = ranks.agreed(measured)
    best = attempt.state.best
    is_best = best is None or measured > best
    if is_best:
        attempt.state = replace(attempt.state, best=defined(measured), best_iteration=iteration)
        attempt.best = weights_of(module)
    kept = "the best so far, kept" if is_best else "not kept"
    log.info("iteration %d: %s %.4g; %s", iteration, metric, measured, kept)
    return is_best
