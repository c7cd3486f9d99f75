"""``metrics.json``: the metrics of an artifact, as one of its files, so that the manifest has their sha256.

A ref holds a copy, which is valid only if it equals this file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_default, is_unset
from vantage.schemas.records.artifacts import StoredArtifact
from vantage.schemas.records.firings import EndedEarly, Firing
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.storage.durable_files import write_file
from vantage.storage.sealed_folders import read_manifest

METRICS_FILE = "metrics.json"
_MAX_BYTES = 2**20


class Measured(Frozen):
    """The content of ``metrics.json``."""

    metrics: dict[str, float | None] = Field(default_factory=dict)
    uncertainty: dict[str, Uncertainty] = Field(default_factory=dict)
    firings: tuple[Firing, ...] = Field((), exclude_if=is_default(()))
    ended_early: EndedEarly | None = Field(None, exclude_if=is_unset)


@dataclass(frozen=True)
class Sealed:
    """Metrics and files digest of an artifact, read from its own files."""

    measured: Measured
    files_digest: str
    """sha256 over the manifest's records of all files except ``metrics.json``: equal for two artifacts with the same
    files, whatever their metrics."""


def write_measured(folder: Path, artifact: StoredArtifact) -> None:
    """Write ``metrics.json`` into the folder of a stage, to be sealed with its files; idempotent.

    Raises:
        ValueError: the stage has written no file, or a file with this name.
    """
    path = folder / METRICS_FILE
    measured = Measured(
        metrics=artifact.metrics,
        uncertainty=artifact.uncertainty,
        firings=_sealed(artifact.firings),
        ended_early=artifact.ended_early,
    )
    # Not sorted: the first metrics are the ones to show.
    data = json.dumps(measured.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode()
    if not any(other.is_file() and other != path for other in folder.rglob("*")):
        folder.stat()  # FileNotFoundError for a folder that is gone
        raise ValueError(f"{folder} holds no file; nothing can be committed")
    if path.is_file() and path.read_bytes() == data:
        return
    if path.exists():
        raise ValueError(f"{path}: this name is kept for what was measured; use another")
    try:
        write_file(path, data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def read_sealed(folder: Path, *, digest: str) -> Sealed:
    """Read metrics and files digest of an object; only the manifest and ``metrics.json`` are read.

    Raises:
        ValueError: manifest or ``metrics.json`` is invalid, or does not match the digest.
        OSError: one of them cannot be read.
    """
    records = read_manifest(folder, digest=digest)
    record, path = records.pop(METRICS_FILE, None), folder / METRICS_FILE
    if record is None:
        raise ValueError(f"{METRICS_FILE}: is not in the manifest")
    if path.is_symlink() or path.lstat().st_size > _MAX_BYTES:
        raise ValueError(f"{METRICS_FILE}: is a link or longer than {_MAX_BYTES} bytes")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError(
            f"{METRICS_FILE}: sha256 is {hashlib.sha256(data).hexdigest()}, must be {record['sha256']}"
        )
    others = canonical_json({"files": [records[path] for path in sorted(records)]})
    return Sealed(Measured.model_validate_json(data), hashlib.sha256(others.encode()).hexdigest())


def contradictions(artifact: StoredArtifact, sealed: Sealed) -> list[str]:
    """Return differences between an artifact's description and its own files, one line each."""
    found = list(differences("metrics", artifact.metrics, sealed.measured.metrics))
    found += differences("uncertainty", artifact.uncertainty, sealed.measured.uncertainty)
    found += differences("guards", _watched(artifact), _watched(sealed.measured))
    if artifact.files_digest != sealed.files_digest:
        found.append(f"files_digest is {artifact.files_digest}, the manifest says {sealed.files_digest}")
    return found


def _watched(measured: Measured | StoredArtifact) -> dict[str, object]:
    """Return name in reports of differences → observations of the guards."""
    return {"firings": _sealed(measured.firings), "ended_early": measured.ended_early}


def _sealed(firings: tuple[Firing, ...]) -> tuple[Firing, ...]:
    """Return the firings of the guards in the recipe, which are also in the stage's key."""
    return tuple(firing for firing in firings if not firing.is_default)


def differences(field: str, said: Mapping[str, object], measured: Mapping[str, object]) -> Iterator[str]:
    """Yield a line for each name whose value differs from that in ``metrics.json``."""
    for name in dict.fromkeys((*said, *measured)):
        one, other = (str(each[name]) if name in each else "absent" for each in (said, measured))
        if one != other:
            yield f"{field}.{name} is {one}, {METRICS_FILE} of the artifact says {other}"
