"""Make the client of a bucket from its address; only this module knows which object storages there are.

A new one is a row of ``SCHEMES``. Its client has to write on condition (only if nothing is there, only over the version that
was read), by which leases exclude other machines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Remote  # takes a moment to load

RETRY_SECONDS = 60.0
"""Seconds for which a request that the network or the server fails is tried again."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One row: a kind of object storage."""

    address: str
    """Form of its addresses, after ``NAME://``."""
    open: Callable[..., "Remote"]
    """Function from an address, and obstore's options of every client, to the client; nothing is asked of the storage yet."""


def _by_url(address: str, **options: Any) -> "Remote":
    from obstore.store import from_url

    return from_url(address, **options)


def _s3(address: str, **options: Any) -> "Remote":
    # Only then are conditional writes sent; without them two machines could both believe that a key is theirs.
    return _by_url(address, conditional_put="etag", **options)


SCHEMES: Mapping[str, Scheme] = {
    "s3": Scheme(address="BUCKET/PREFIX", open=_s3),
    "gs": Scheme(address="…", open=_by_url),
    "az": Scheme(address="…", open=_by_url),
}
"""First part of an address → the kind of storage."""


def address_forms() -> tuple[str, ...]:
    """Return the form of the addresses of each kind of storage, for help and for messages."""
    return tuple(f"{name}://{scheme.address}" for name, scheme in SCHEMES.items())


def open_bucket(address: str, *, retry_seconds: float = RETRY_SECONDS) -> "Remote":
    """Return the client for a part of a bucket at an address; nothing is asked of it yet.

    Raises:
        ValueError: another scheme, or no bucket.
    """
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES or not parts.netloc or parts.query or parts.fragment or parts.username:
        *first, last = address_forms()
        raise ValueError(
            f"storage {address!r} is no bucket's address; write {', '.join(first)} or {last}, and give the login "
            "in the environment"
        )
    retry = {"retry_timeout": timedelta(seconds=retry_seconds)}
    return SCHEMES[parts.scheme].open(address, retry_config=retry)
