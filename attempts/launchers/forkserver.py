"""Preload the libraries of stage processes.

Only multiprocessing's fork server imports this module. Its children are forks of a process that has loaded torch and
transformers, so that a stage starts in a fraction of a second instead of several. Nothing here may use an accelerator,
because a CUDA context does not survive a fork.
"""

import atexit
import importlib
import logging
import os
import signal
import warnings

from vantage.attempts.launchers.descendants import adopt_descendants, end_descendants
from vantage.attempts.launchers.quick_imports import quick_imports
from vantage.schemas.kinds import STAGES

PRELOADED = (
    "vantage.attempts.launchers.stage_process",
    "torch",
    "safetensors.torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "vantage.tasks.stages",
    *(kind.module for kind in STAGES.values()),
    "vantage.schemas.tables",
)
"""Libraries in the order of their import; stages themselves import other families of models."""

# The orchestrator handles signals to the process group: if the fork server ended first, its children would be killed
# before they could save. It ends when the orchestrator's end of its pipe closes.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
# In its own session it survives a kill -9 of the group, long enough to kill the processes of stages.
os.setsid()
adopt_descendants()
warnings.filterwarnings(
    "ignore", message="forkserver: waitpid returned unexpected pid"
)  # the process was adopted, not forked

with quick_imports():
    for _name in PRELOADED:
        try:
            importlib.import_module(_name)
        except Exception as error:  # the stage that needs the module gets the same error and reports it
            logging.getLogger(__name__).debug("%s is not preloaded: %s", _name, error)


def _end() -> None:
    """Kill stages and their descendants at once when the orchestrator has ended, without torch's exit handlers."""
    end_descendants(os.getpid())
    os._exit(0)


atexit.register(_end)
