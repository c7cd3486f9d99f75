"""Who computes, as one flat record of texts: it describes, is in no stage key, and is never compared by ``plan``."""

from vantage.attempts.identity.environment import constraints_digest, environment
from vantage.attempts.identity.hardware import container_image, hardware
from vantage.attempts.identity.package import package_digest, package_version
from vantage.attempts.identity.revision import revision
from vantage.schemas.safe_text import safe_text

_LONGEST = 300
"""Characters of a text that a machine says of itself."""


def identity() -> dict[str, str]:
    """Return part → text, of this process on this machine; no name of a user or a host, no path.

    ``version``, ``package`` (digest of our installed files), ``revision``, ``dirty``; ``environment`` (digest of all that
    is installed), ``constraints`` (digest of the file), ``system``, ``image``; ``cpu``, ``cpus``, ``memory``, ``gpus``,
    ``driver``.
    """
    commit, dirty = revision()
    installed = environment()
    told = {
        "version": package_version(),
        "package": package_digest(),
        "revision": commit,
        "dirty": dirty,
        "environment": installed.digest,
        "constraints": constraints_digest(),
        "system": f"{installed.system}, {installed.machine}",
        "image": container_image(),
        **hardware(),
    }
    return {part: " ".join(safe_text(text).split())[:_LONGEST] for part, text in told.items()}
