"""Imports of torch and transformers in two thirds of their time, for processes that a person or a run waits for.

``python -m flows.launchers.quick_imports MODULE`` imports the module so, and calls its ``main``.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

LEFT_OUT = ("sklearn", "scipy", "boto3")
"""transformers, and accelerate beneath it, import them where they are installed (MLflow brings them), for losses, decoding and
clouds that no stage uses. Whoever imports them afterwards gets them."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without looking for garbage and without what is left out: each is a sixth of the time, or more.

    What is loaded then is frozen: it stays, and later collections need not look through it.
    """
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
