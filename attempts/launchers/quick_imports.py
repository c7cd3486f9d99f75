"""Import torch and transformers in two thirds of the usual time, for processes for which a person or a run waits, and
make torch's threads leave a CPU to others while they wait.

``python -m vantage.attempts.launchers.quick_imports MODULE`` imports the module in this way, and calls its ``main``.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

LEFT_OUT = ("sklearn", "scipy", "boto3")
"""Modules that transformers and accelerate import if they are installed (MLflow brings them), for losses, decoding and
clouds that no stage uses. A later import still loads them."""

SPINS = "2000"
"""Value of GOMP_SPINCOUNT: how often one of torch's CPU threads polls for its next operation before it sleeps. By
libgomp's default it polls for milliseconds, even if another process needs its CPU: two processes of two threads each on
two CPUs took, by chance, up to forty times as long as with this value. Without other processes, training takes as long
either way, and sampling takes a tenth longer with it (benchmarks/waiting_threads.py)."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection and without the modules in ``LEFT_OUT``; each of these saves a sixth of the
    time, or more.

    Modules that are loaded inside the block are frozen: they stay, and later collections skip them. torch's threads
    poll ``SPINS`` times, unless the user sets GOMP_SPINCOUNT or OMP_WAIT_POLICY.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded
    sys.modules.update(dict.fromkeys(LEFT_OUT))  # type: ignore[arg-type]  # None: as if they were not installed
    gc.disable()
    try:
        yield
    finally:
        for name in LEFT_OUT:
            sys.modules.pop(name, None)
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    with quick_imports():
        found = import_module(sys.argv.pop(1))
    found.main()
