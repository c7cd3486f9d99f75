"""The environment's settings of destinations beside MLflow; nothing here imports their packages."""

import os
from importlib.util import find_spec
from pathlib import Path

TENSORBOARD = "VANTAGE_TENSORBOARD"
"""Variable with the folder for TensorBoard's event files; unset or empty: none are written."""


def check_destinations() -> None:
    """Refuse settings that cannot work, before a run computes for hours and its records go nowhere.

    Raises:
        ValueError: a package is missing, or the address is none; the message contains the remedy.
    """
    if folder := os.environ.get(TENSORBOARD):
        if "://" in folder or "\0" in folder:
            raise ValueError(
                f"{TENSORBOARD}={folder[:200]!r} is no folder of this machine; name one, for example {TENSORBOARD}=runs"
            )
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"{TENSORBOARD}={folder[:200]!r} is a file; name a folder, or unset it")
        _require("tensorboard", TENSORBOARD, extra="tensorboard")


def is_installed(package: str) -> bool:
    """Return whether the package can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _require(package: str, variable: str, *, extra: str) -> None:
    if not is_installed(package):
        raise ValueError(
            f"{variable} is set, and the package {package} is not installed; run `pip install 'vantage-rlhf[{extra}]'`, "
            f"or unset {variable}"
        )
