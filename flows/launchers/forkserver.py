"""What every stage's process finds already loaded.

Imported by multiprocessing's fork server and by nothing else: its children are forks of a process that holds
torch and transformers, so that a stage starts in a fraction of a second instead of several. Nothing here may
touch an accelerator, because a CUDA context does not survive a fork.
"""

import atexit
import gc
import importlib
import logging
import os
import signal
import warnings

from flows.launchers.descendants import adopt_descendants, end_descendants
from schemas.kinds import STAGES

PRELOADED = (
    "flows.launchers.stage_process",
    "torch",
    "safetensors.torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "tasks.stages",
    *(kind.module for kind in STAGES.values()),
    "schemas.tables",
)
"""In this order; the models' family that is not here is loaded by the stage that wants it."""

# A signal to the whole process group is the orchestrator's to handle: were the fork server to go first, its
# children would be killed before they could save. It ends when the orchestrator's end of its pipe closes.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
# In a session of its own it outlives even a kill -9 of the whole group, for as long as it takes to end what stages left.
os.setsid()
adopt_descendants()
warnings.filterwarnings(
    "ignore", message="forkserver: waitpid returned unexpected pid"
)  # one that was adopted

for _name in PRELOADED:
    try:
        importlib.import_module(_name)
    except Exception as error:  # the stage that needs it meets the same error and reports it in its log
        logging.getLogger(__name__).debug("%s is not preloaded: %s", _name, error)

gc.collect()
gc.freeze()  # what is loaded stays in pages shared by all children


def _end() -> None:
    """When the orchestrator is gone, stages and all that they started must be gone at once, without a farewell to torch."""
    end_descendants(os.getpid())
    os._exit(0)


atexit.register(_end)
