"""Check digests before they become parts of paths."""

import re

_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether the text is a sha256 in lower-case hexadecimal."""
    return _DIGEST.fullmatch(text) is not None


def checked_digest(digest: str) -> str:
    """Return the digest, if it is one: it becomes part of a path.

    Raises:
        ValueError: it is not.
    """
    if not is_digest(digest):
        raise ValueError(f"{digest!r} is not a sha256 in lower-case hexadecimal")
    return digest
