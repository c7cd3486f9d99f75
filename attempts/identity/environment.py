"""Read the environment of our code: Python, the operating system, all distributions, and the constraints file."""

import hashlib
import os
import platform
import re
import sys
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from vantage.attempts.identity.revision import UNKNOWN, checkout_of_package
from vantage.schemas.records.environment import Environment, Installed

_HEADER = re.compile(r"^(Name|Version|License|License-Expression): *(.*(?:\n[ \t].*)*)$", re.MULTILINE)
"""Headers of the core metadata, each with the indented lines that continue its value."""
_CLASSIFIER = re.compile(r"^Classifier: License :: (.+)$", re.MULTILINE)
_LONGEST_LICENSE = 100
"""Most characters of a licence's name. A longer value, or one of several lines, is the text of a licence."""
_NO_LICENSE = "OSI Approved"
"""The classifier that names no licence."""


@cache
def environment() -> Environment:
    """Return everything that is installed on this process's import path; it is read once."""
    return Environment(
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        system=operating_system(),
        machine=platform.machine() or UNKNOWN,
        installed=tuple(sorted(_installed().values(), key=lambda each: each.name)),
    )


def operating_system() -> str:
    """Return ``Debian GNU/Linux 12 (bookworm)``, or the kernel's name if the system has no name."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system() or UNKNOWN


def constraints_digest() -> str:
    """Return the sha256 of the file that ``PIP_CONSTRAINT`` names, else of the checkout's constraints.txt; ``unknown`` if there is none."""
    named = os.environ.get("PIP_CONSTRAINT", "").strip()
    checkout = checkout_of_package()
    path = Path(named) if named else None if checkout is None else checkout / "constraints.txt"
    try:
        return UNKNOWN if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):  # the variable names several files, or an address
        return UNKNOWN


def _installed() -> dict[str, Installed]:
    """Return name → distribution; of two with one name the first on the path, since that one is imported."""
    found: dict[str, Installed] = {}
    for each in distributions(path=[place for place in sys.path if place]):
        described = _described(each.read_text("METADATA") or each.read_text("PKG-INFO") or "")
        if described is not None:
            found.setdefault(described.name, described)
    return found


def _described(metadata: str) -> Installed | None:
    """Return a distribution by its core metadata, of which only the headers are read; None: they have no name or version."""
    headers = metadata.partition("\n\n")[0]
    fields: dict[str, str] = {}
    for name, value in _HEADER.findall(headers):
        fields.setdefault(name, value.strip())
    if not fields.get("Name") or not fields.get("Version"):
        return None
    plain = fields.get("License", "")
    if len(plain) > _LONGEST_LICENSE or "\n" in plain or plain.upper() == "UNKNOWN":
        plain = ""
    classified = [line.rpartition(" :: ")[2].strip() for line in _CLASSIFIER.findall(headers)]
    return Installed(
        name=re.sub(r"[-_.]+", "-", fields["Name"]).lower(),
        version=fields["Version"],
        license=fields.get("License-Expression")
        or plain
        or " or ".join(each for each in classified if each != _NO_LICENSE),
    )
