"""Reads other processes, of which any may end between two readings."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import psutil

T = TypeVar("T")


def read_living(
    processes: Iterable[psutil.Process], read: Callable[[psutil.Process], T]
) -> dict[psutil.Process, T]:
    """Return process → what ``read`` returns for it, without those that have ended before or while they are read.

    A zombie has ended: it only waits for its parent.
    """
    found = {}
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # also of a zombie
            if each.status() != psutil.STATUS_ZOMBIE:
                found[each] = read(each)
    return found


def with_word(processes: Iterable[psutil.Process], word: str) -> list[psutil.Process]:
    """Return the living processes whose command line contains this word, of those given."""
    return [each for each, line in read_living(processes, psutil.Process.cmdline).items() if word in line]
