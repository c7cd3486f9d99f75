"""Check digests before they become parts of paths."""

import re

_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether the text is a sha256 in lower-case hexadecimal."""
    return _DIGEST.fullmatch(text) is not None


def checked_digest(digest: str) -> str:
    """Return the text if it is a digest: digests become parts of paths.

    Raises:
        ValueError: the text is no digest.
    """
    if not is_digest(digest):
        raise ValueError(f"{digest!r} is not a sha256 in lower-case hexadecimal")
    return digest
