"""Environment variables by which a child process finds our package, and nothing else that its parent would not find.

A checkout's root also holds our packages under their bare names (``models``, ``tasks``). So it is put on a child's path
only if the child would not find ``vantage`` without it.
"""

import json
import os
import site
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vantage.attempts.identity.package import DISTRIBUTION, package_folder


def python_environment() -> dict[str, str]:
    """Return environment variables for every Python child that imports ``vantage``.

    The folder that a child is started in is not on its path: a ``datasets.py`` there would hide a library.
    """
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    root = str(package_folder().parent)
    needed = [] if root in inherited or _is_installed() else [root]
    path = os.pathsep.join([*inherited, *needed])
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": path} if path else {})}


@cache
def _is_installed() -> bool:
    """Return whether a new interpreter finds our package in this same folder by itself."""
    places = [*site.getsitepackages(), site.getusersitepackages()]
    return any(_holds_ours(found) for found in distributions(name=DISTRIBUTION, path=places))


def _holds_ours(found: Distribution) -> bool:
    ours = package_folder()
    if Path(str(found.locate_file(ours.name))) == ours:
        return True
    origin = json.loads(found.read_text("direct_url.json") or "{}")  # PEP 610
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return is_editable and Path(unquote(urlsplit(origin["url"]).path)) == ours.parent
