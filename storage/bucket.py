"""Make the client of a bucket from its address; only this module knows the kinds of object storage.

A new kind is a row of ``SCHEMES``. Its client must support conditional writes (only if nothing is there, only over the
version that was read), since leases exclude other machines by them.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vantage.schemas.safe_text import without_secrets

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Remote  # takes a moment to load

RETRY_SECONDS = 60.0
"""Seconds for which a request is tried again after a failure of the network or the server."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One row: a kind of object storage."""

    address: str
    """Form of its addresses, after ``NAME://``."""
    open: Callable[..., "Remote"]
    """Function from an address, and obstore's options of every client, to the client; it sends no request yet."""
    variables: str | None = None
    """Prefix of the variables that obstore reads for this storage, which are checked; None: none are checked."""


def _by_url(address: str, **options: Any) -> "Remote":
    from obstore.store import from_url

    return from_url(address, **options)


def _s3(address: str, **options: Any) -> "Remote":
    # Only with this option are conditional writes sent; without them two machines could both hold one key.
    return _by_url(address, conditional_put="etag", **options)


_ENDPOINTS = (
    *("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    *("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL"),
)
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINT = re.compile(
    r"(?P<scheme>https?)://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:(?P<port>\d{1,5}))?(/[\w./~-]*)?", re.ASCII
)
_REGION = re.compile(r"[\w.-]{1,64}", re.ASCII)
_YES = ("1", "true", "yes", "on", "y")
"""Values that obstore reads as true."""

SCHEMES: Mapping[str, Scheme] = {
    "s3": Scheme(address="BUCKET/PREFIX", open=_s3, variables="AWS_"),
    "gs": Scheme(address="…", open=_by_url, variables="GOOGLE_"),
    "az": Scheme(address="…", open=_by_url, variables="AZURE_"),
}
"""First part of an address → the kind of storage."""


def address_forms() -> tuple[str, ...]:
    """Return the form of the addresses of each kind of storage, for help and for messages."""
    return tuple(f"{name}://{scheme.address}" for name, scheme in SCHEMES.items())


def open_bucket(address: str, *, retry_seconds: float = RETRY_SECONDS) -> "Remote":
    """Return the client for a part of a bucket at an address; no request is sent yet.

    Raises:
        ValueError: another scheme, no bucket, or an invalid endpoint or region in the environment.
    """
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES or not parts.netloc or parts.query or parts.fragment or parts.username:
        *first, last = address_forms()
        raise ValueError(
            f"storage {address!r} is no bucket's address; write {', '.join(first)} or {last}, and give the login "
            "in the environment"
        )
    scheme = SCHEMES[parts.scheme]
    if scheme.variables is not None:
        _check_environment(scheme.variables)
    retry = {"retry_timeout": timedelta(seconds=retry_seconds)}
    return scheme.open(address, retry_config=retry)


def _check_environment(beginning: str) -> None:
    """Refuse endpoints and regions at which obstore panics, and remove empty variables.

    An empty variable means that none was set, such as ``${AWS_REGION:-}`` in a Compose file; obstore would take it for
    a value.
    """
    for name, value in list(os.environ.items()):
        if not name.startswith(beginning):
            continue
        if not value.strip():
            del os.environ[name]
        elif name in _ENDPOINTS:
            _check_endpoint(name, value)
        elif name in _REGIONS and not _REGION.fullmatch(value):
            raise ValueError(
                f"{name}={value[:100]!r} is no region: it has letters, digits, dots, dashes; correct it (us-east-1), or unset it"
            )


def _check_endpoint(name: str, value: str) -> None:
    found = _ENDPOINT.fullmatch(value)
    if found is None or int(found["port"] or 0) > 65535:
        raise ValueError(
            f"{name}={without_secrets(value)[:100]!r} is no address of a storage server; write https://HOST:PORT, without a login or "
            "a query, or unset it"
        )
    is_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in _YES
    if name.startswith("AWS_") and found["scheme"] == "http" and not is_allowed:
        raise ValueError(
            f"{name}={value[:100]!r} has no TLS, so data would cross the network in plain text; write https://, or set "
            "AWS_ALLOW_HTTP=true where that network is yours"
        )
