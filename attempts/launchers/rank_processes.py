"""Record which process computes which rank of an attempt on this machine, for the watchdog."""

import os
from contextlib import suppress
from pathlib import Path

LOGS = "torchrun"
"""Folder of an attempt in which the ranks of one machine write."""
_RANK = "rank-"


def announce_rank(attempt: Path, rank: int) -> None:
    """Record that this process computes the rank."""
    (attempt / LOGS / f"{_RANK}{rank}").write_text(str(os.getpid()))


def forget_ranks(attempt: Path) -> None:
    """Remove the records of an earlier try of the attempt: other processes may have its ids by now."""
    for file in (attempt / LOGS).glob(f"{_RANK}*"):
        with suppress(OSError):
            file.unlink()


def rank_processes(attempt: Path) -> dict[int, int]:
    """Return the number of each rank that has begun → its process id; nothing for a stage of one process."""
    found = {}
    for file in (attempt / LOGS).glob(f"{_RANK}*"):
        with suppress(OSError, ValueError):  # this rank has not written its file yet
            found[int(file.name.removeprefix(_RANK))] = int(file.read_text())
    return dict(sorted(found.items()))
