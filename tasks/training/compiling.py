"""``compile: true``: compile the networks of a stage that trains, if that is possible."""

import logging
from typing import TypeVar

from torch import nn

from vantage.models.compiled_layers import CannotCompile, compile_layers
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.job import StageJob
from vantage.tasks.training import compile_outcome
from vantage.tasks.training.optimization import autocast, training_device

log = logging.getLogger(__name__)

Network = TypeVar("Network", bound=nn.Module)


def compiled(job: StageJob, network: Network) -> Network:
    """Return the network, with compiled layers if the stage asks for it; uncompiled, with a warning, if that fails."""
    work = job.work
    if not isinstance(work, Training) or not work.compile:
        return network
    try:
        with autocast(work.arithmetic, training_device()):
            graphs = compile_layers(network, packs=getattr(work, "packing", False))
    except CannotCompile as error:
        log.warning("compile: true does nothing for %s, which is slower: %s", type(network).__name__, error)
        compile_outcome.note(is_compiled=False)
    else:
        log.info("compiled %s: %d graphs", type(network).__name__, graphs)
        compile_outcome.note(is_compiled=True)
    return network
