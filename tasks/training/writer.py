"""Decide which process of a stage writes its files. No tensor library is loaded."""

import os


def writes_files() -> bool:
    """Return whether this process writes checkpoints, journal, progress and the artifact: the first of a stage's processes.

    The environment decides, which launchers of several processes (torchrun, Ray Train) set; a single process is the
    first.
    """
    return int(os.environ.get("RANK", "0")) == 0
