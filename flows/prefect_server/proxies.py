"""Handle proxies and certificates of the environment that Prefect's client cannot use: they would end every command
with an error of its HTTP library."""

import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from vantage.schemas.safe_text import safe_text

CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_REMEDIES = {
    CERTIFICATES: "name a file of certificates that exists, in PEM, or unset the variable",
    PROXIES: "name an http:// proxy, install what it names, or unset the variable",
}


def check_proxies(*, elsewhere: bool) -> None:
    """Remove proxies and certificates that Prefect's client cannot use, if all servers are on this machine; else refuse
    them.

    A SOCKS proxy needs a package that Prefect does not install. Users may want to prevent requests to other machines
    without the proxy. A client fails without its file of certificates even for addresses that need none.

    Args:
        elsewhere: whether the storage is on another machine.

    Raises:
        ValueError: a variable cannot be used, and a server is on another machine; the message names both.
    """
    for names, remedy in 2 * list(_REMEDIES.items()):  # the fault of one variable may hide that of another
        named = [name for name in os.environ if name.upper() in names and os.environ[name]]
        if not named:
            continue
        problem = _problem()
        if problem is None or problem == _problem(without=named):
            continue
        remote = [
            f"{variable}={safe_text(os.environ[variable])}"
            for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
            if _is_remote(os.environ.get(variable, ""))
        ]
        if remote or elsewhere:
            shown = ", ".join(f"{name}={safe_text(os.environ[name])}" for name in named)
            raise ValueError(
                f"{shown}: Prefect's client cannot use this ({problem}), and {remote[0] if remote else 'the bucket'} is "
                f"on another machine; {remedy}"
            )
        for name in named:
            del os.environ[name]


def _problem(*, without: Sequence[str] = ()) -> str | None:
    """Return the reason why Prefect's HTTP library cannot make a client in this environment; None: it can.

    Args:
        without: variables that are left out of the environment.
    """
    import httpx

    hidden = {name: os.environ.pop(name) for name in without}
    try:
        httpx.Client().close()
    except Exception as error:
        # raised by httpx, by the parser of the address, or by an import that SOCKS needs
        return safe_text(str(error).splitlines()[0] if str(error) else type(error).__name__)
    finally:
        os.environ.update(hidden)
    return None


def _is_remote(address: str) -> bool:
    try:
        parts = urlsplit(address)
        host = parts.hostname
    except ValueError:
        return True
    return parts.scheme in ("http", "https") and host not in ("localhost", "127.0.0.1", "::1")
