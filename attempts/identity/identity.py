"""Describe the code and the machine of a computation as texts. The record is in no stage key, and ``plan`` never
compares it."""

from vantage.attempts.identity.environment import constraints_digest, environment
from vantage.attempts.identity.hardware import container_image, hardware
from vantage.attempts.identity.package import package_digest, package_version
from vantage.attempts.identity.revision import revision
from vantage.schemas.safe_text import safe_text

_LONGEST = 300
"""Most characters of a text that describes the machine."""


def identity() -> dict[str, str]:
    """Return part → text for this process on this machine, without names of users or hosts and without paths.

    ``version``, ``package`` (digest of our installed files), ``revision``, ``dirty``; ``environment`` (digest of all that
    is installed), ``constraints`` (digest of the file), ``system``, ``image``; ``cpu``, ``cpus``, ``memory``, ``gpus``,
    ``driver``.
    """
    commit, dirty = revision()
    installed = environment()
    parts = {
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
    return {part: " ".join(safe_text(text).split())[:_LONGEST] for part, text in parts.items()}
