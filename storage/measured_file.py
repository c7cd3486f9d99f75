"""What was measured of an artifact, as a file among its files: under the manifest's sha256 like every other.

A ref holds a copy, which is believed only where it says the same.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from schemas.frozen import Frozen
from schemas.records.artifacts import StoredArtifact
from schemas.records.stage_key import canonical_json
from schemas.records.uncertainty import Uncertainty
from storage.durable_files import write_file
from storage.sealed_folders import read_manifest

MEASURED = "metrics.json"
_MAX_BYTES = 2**20


class Measured(Frozen):
    """The content of ``metrics.json``."""

    metrics: dict[str, float | None] = Field(default_factory=dict)
    uncertainty: dict[str, Uncertainty] = Field(default_factory=dict)


@dataclass(frozen=True)
class Sealed:
    """What a sealed artifact says of itself."""

    measured: Measured
    files_digest: str
    """sha256 over the records of all files but ``metrics.json``: equal where two artifacts hold the same files,
    whatever was measured of them."""


def write_measured(folder: Path, artifact: StoredArtifact) -> None:
    """Put ``metrics.json`` beside the files of a stage, to be sealed with them; a second time changes nothing.

    Raises:
        ValueError: the stage has written no file, or one of this name.
    """
    path = folder / MEASURED
    measured = Measured(metrics=artifact.metrics, uncertainty=artifact.uncertainty)
    # Not sorted: the first of the metrics are those that a stage wants shown.
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
    """What the files of an object say was measured, and what the others hold; of these only the manifest is read.

    Raises:
        ValueError: manifest or ``metrics.json`` is not what the digest says, or is none.
        OSError: it cannot be read.
    """
    records = read_manifest(folder, digest=digest)
    record, path = records.pop(MEASURED, None), folder / MEASURED
    if record is None:
        raise ValueError(f"{MEASURED}: is not in the manifest")
    if path.is_symlink() or path.lstat().st_size > _MAX_BYTES:
        raise ValueError(f"{MEASURED}: is a link or longer than {_MAX_BYTES} bytes")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError(
            f"{MEASURED}: sha256 is {hashlib.sha256(data).hexdigest()}, must be {record['sha256']}"
        )
    others = canonical_json({"files": [records[path] for path in sorted(records)]})
    return Sealed(Measured.model_validate_json(data), hashlib.sha256(others.encode()).hexdigest())


def contradictions(artifact: StoredArtifact, sealed: Sealed) -> list[str]:
    """What an artifact's description says otherwise than its own files; empty: nothing."""
    found = list(differences("metrics", artifact.metrics, sealed.measured.metrics))
    found += differences("uncertainty", artifact.uncertainty, sealed.measured.uncertainty)
    if artifact.files_digest != sealed.files_digest:
        found.append(f"files_digest is {artifact.files_digest}, the manifest says {sealed.files_digest}")
    return found


def differences(field: str, said: Mapping[str, object], measured: Mapping[str, object]) -> Iterator[str]:
    """A line for each name that is said to be otherwise than ``metrics.json`` has it."""
    for name in dict.fromkeys((*said, *measured)):
        one, other = (str(each[name]) if name in each else "absent" for each in (said, measured))
        if one != other:
            yield f"{field}.{name} is {one}, {MEASURED} of the artifact says {other}"
