"""MLflow tags for the user and the version of the code."""

import getpass

from vantage.attempts.identity.package import package_digest, package_version
from vantage.attempts.identity.revision import UNKNOWN, revision

_CHANGED = {"yes": "true", "no": "false"}


def origin() -> dict[str, str]:
    """Return tag → value: the user, the version and digest of our packages, and their git revision if there is one."""
    code = revision()
    tags = {
        "mlflow.user": user(),
        "vantage.version": package_version(),
        "vantage.code_sha256": package_digest(),
    }
    if code.commit != UNKNOWN:
        tags["mlflow.source.git.commit"] = code.commit
    if code.dirty in _CHANGED:
        tags["vantage.git.dirty"] = _CHANGED[code.dirty]
    return tags


def user() -> str:
    """Return the login name of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # the user of a container may have no name
        return "unknown"
