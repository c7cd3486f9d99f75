"""Proxies of the environment that Prefect's client cannot use, and which would end every command in an error of its HTTP library."""

import os
from urllib.parse import urlsplit

from vantage.schemas.safe_text import safe_text

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def check_proxies(*, elsewhere: bool) -> None:
    """Remove proxies that Prefect's client cannot use, if only this machine is asked; else refuse them.

    A SOCKS proxy needs a package that Prefect does not bring. To ask a server of another machine without the proxy might
    be what its user wants to prevent.

    Args:
        elsewhere: the storage is on another machine.

    Raises:
        ValueError: a variable cannot be used, and a server is on another machine; the message names both.
    """
    named = [name for name in os.environ if name.upper() in NAMES and os.environ[name]]
    if not named or (problem := _problem()) is None:
        return
    remote = [
        f"{variable}={safe_text(os.environ[variable])}"
        for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
        if _is_remote(os.environ.get(variable, ""))
    ]
    if remote or elsewhere:
        proxies = ", ".join(f"{name}={safe_text(os.environ[name])}" for name in named)
        raise ValueError(
            f"{proxies}: Prefect's client cannot use this ({problem}), and {remote[0] if remote else 'the bucket'} is "
            "on another machine; name an http:// proxy, install what it names, or unset the variable"
        )
    for name in named:
        del os.environ[name]


def _problem() -> str | None:
    """Return the reason why Prefect's HTTP library cannot make a client in this environment; None: it can."""
    import httpx

    try:
        httpx.Client().close()
    except Exception as error:  # of its own, of the address's parser, or of the import of what SOCKS needs
        return safe_text(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return None


def _is_remote(address: str) -> bool:
    try:
        parts = urlsplit(address)
        host = parts.hostname
    except ValueError:
        return True
    return parts.scheme in ("http", "https") and host not in ("localhost", "127.0.0.1", "::1")
