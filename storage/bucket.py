"""The client of a bucket, by its address."""

from datetime import timedelta
from urllib.parse import urlsplit

from obstore.store import ObjectStore as Remote
from obstore.store import from_url

SCHEMES = ("s3", "gs", "az")


RETRY_SECONDS = 60.0
"""How long one request is tried again when the network or the server fails it."""


def open_bucket(address: str, *, retry_seconds: float = RETRY_SECONDS) -> Remote:
    """Return the part of a bucket at ``s3://bucket/prefix``, ``gs://…`` or ``az://…``; nothing is asked of it yet.

    Raises:
        ValueError: another scheme, or no bucket.
    """
    parts = urlsplit(address)
    if parts.scheme not in SCHEMES or not parts.netloc or parts.query or parts.fragment or parts.username:
        raise ValueError(
            f"storage {address!r} is no bucket's address; write s3://BUCKET/PREFIX, gs://… or az://…, and give the login "
            "in the environment"
        )
    timeout = timedelta(seconds=retry_seconds)
    if parts.scheme == "s3":
        # Only then are conditional writes sent; without them two machines could both believe that a key is theirs.
        return from_url(address, retry_config={"retry_timeout": timeout}, conditional_put="etag")
    return from_url(address, retry_config={"retry_timeout": timeout})
