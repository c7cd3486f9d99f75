"""The environment's settings of destinations beside MLflow; nothing here imports their packages."""

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from vantage.schemas.safe_text import safe_text, without_secrets

TENSORBOARD = "VANTAGE_TENSORBOARD"
"""Variable with the folder for TensorBoard's event files; unset or empty: none are written."""


OPENLINEAGE = "OPENLINEAGE_URL"
"""Variable with the address of a server of OpenLineage, as other programs read it; unset or empty: nothing is sent."""


def check_destinations() -> None:
    """Refuse settings that cannot work, before a run computes for hours and its records go nowhere.

    Raises:
        ValueError: a package is missing, or the address is invalid; the message contains the remedy.
    """
    if folder := os.environ.get(TENSORBOARD):
        if "://" in folder or "\0" in folder:
            raise ValueError(
                f"{TENSORBOARD}={folder[:200]!r} is no folder of this machine; name one, for example {TENSORBOARD}=runs"
            )
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"{TENSORBOARD}={folder[:200]!r} is a file; name a folder, or unset it")
        _require("tensorboard", TENSORBOARD, extra="tensorboard")
    if url := openlineage_url():
        if not _is_server(url):
            raise ValueError(
                f"{OPENLINEAGE}={safe_text(without_secrets(url))[:200]!r} is no address of a server; write http://HOST:PORT, or unset it"
            )
        _require("openlineage.client", OPENLINEAGE, extra="openlineage")


def is_any_set() -> bool:
    """Return whether the environment names any destination beside MLflow."""
    return bool(os.environ.get(TENSORBOARD) or openlineage_url())


def openlineage_url() -> str | None:
    """Return the address of the server of OpenLineage; None: there is none, or ``OPENLINEAGE_DISABLED`` is true."""
    if os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return None
    return os.environ.get(OPENLINEAGE) or None


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not any(map(str.isspace, url))


def is_installed(package: str) -> bool:
    """Return whether the package can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _require(package: str, variable: str, *, extra: str) -> None:
    if not is_installed(package):
        raise ValueError(
            f"{variable} is set, and the package {package} is not installed; run `pip install 'vantage-rlhf[{extra}]'`, "
            f"or unset {variable}"
        )
