"""Make CPython's garbage collector run less often in processes that begin with many imports."""

import atexit
import gc

THRESHOLDS = (50_000, 20, 20)
"""Number of objects made between two collections, then the number of collections of one generation before the next generation
is collected. CPython's own numbers are 700, 10, 10 (2,000 from 3.12 on)."""


def collect_rarely() -> None:
    """Collect less often while this process runs, and not at its end: Prefect's and MLflow's modules are a million
    objects that stay, and scanning them repeatedly takes a sixth of the time of their import, and 0.7 s at the end.

    Memory grows at most by the cycles among 50,000 objects before they are found. Do not use this in processes that
    compute: a cycle may hold tensors.
    """
    gc.set_threshold(*THRESHOLDS)
    atexit.register(gc.freeze)
