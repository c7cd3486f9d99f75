"""Read the facts of an attempt (``vantage.schemas.records.facts``) on the machine that computes it."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from vantage.schemas.records.facts import FACTS, Facts


def _load() -> str:
    """Return the load average of the last minute, and the number of CPUs to compare it with."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} CPUs"


READERS: Mapping[str, Callable[[], str]] = {
    "load": _load,
}
"""Name of a fact → its reader, which raises OSError if the machine does not know the fact."""


def read_facts() -> Facts:
    """Return the facts of an attempt that is about to begin; facts that cannot be read are left out."""
    found = {}
    for fact in FACTS:
        with suppress(OSError):
            found[fact.name] = READERS[fact.name]()
    return found
