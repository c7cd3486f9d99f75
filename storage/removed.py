"""Keep a record of each removed artifact that is enough to describe it later.

    removed/<digest>/manifest.json            every file's path, size and sha256; its own sha256 is the digest
    removed/<digest>/metrics.json             the metrics; the manifest still has their sha256
    removed/<digest>/refs/<stage key>.json    each ref that pointed to it: key parts, parents, provenance, run
    removed/<digest>/removal.json             when, why and by whom; written last, before the first file is removed

First each ref is recorded and removed, then the rest is recorded, then the object is removed. So after a kill at any
moment either the object exists, or its record is complete. If an artifact is made again, its record stays, and is
replaced when the artifact is removed again.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from vantage.schemas.frozen import Frozen
from vantage.storage.digests import checked_digest, is_digest
from vantage.storage.durable_files import make_folder, replace_file
from vantage.storage.measured_file import METRICS_FILE, Measured, contradictions, read_sealed
from vantage.storage.refs import Ref, check_ref
from vantage.storage.sealed_folders import MANIFEST, MAX_MANIFEST_BYTES, read_manifest, read_sealed_file

if TYPE_CHECKING:
    from vantage.storage.storage import Readable

REMOVED_FOLDER = "removed"
CAUSE_FILE = "removal.json"
_REFS = "refs"


class Cause(Frozen):
    """Reason of a removal; it is only shown."""

    when: str
    """Date and time (ISO 8601, UTC) by the clock of the machine that removed it."""
    why: str
    """The rule by which it was removed, and the command."""
    by: str
    """User, machine and program that removed it."""


class RemovedFile(Frozen):
    """A file that the artifact had."""

    size: int
    """Size in bytes."""
    sha256: str
    """The file's sha256 in lower-case hexadecimal."""


class Removal(Frozen):
    """An artifact that was removed."""

    digest: str
    """The artifact's digest: the sha256 of its manifest."""
    when: str
    """Time of the removal (ISO 8601, UTC), by the machine's clock."""
    why: str
    """The rule by which it was removed."""
    by: str
    """User, machine and program that removed it."""
    files: dict[str, RemovedFile] | None
    """Path → file, from the manifest, which was checked against the digest; None: the manifest was damaged already."""
    measured: Measured | None
    """The artifact's metrics, checked against the manifest; None if ``files`` is None."""
    refs: tuple[Ref, ...] = Field(default=())
    """Every ref that pointed to it and was removed, by stage key: parents, key parts, provenance, run."""


def find_removed(storage: "Readable", digest: str) -> Removal | None:
    """Return the record of a removed artifact; None: it was never removed, or exists again.

    Raises:
        ValueError: ``digest`` is not a digest; or the record was damaged or edited: manifest, metrics or a ref do not match
            the digest.
        OSError: the record cannot be read.
    """
    checked_digest(digest)
    if storage.has_object(digest):
        return None
    with TemporaryDirectory() as folder:
        _fetch(storage, digest, Path(folder))
        return _read(Path(folder), digest)


def what_stays(folder: Path, digest: str) -> dict[str, bytes]:
    """Return name → bytes of an object's small files that are kept after its removal; empty: its manifest is
    damaged."""
    with suppress(ValueError, OSError):
        read_manifest(folder, digest=digest)
        kept = {MANIFEST: (folder / MANIFEST).read_bytes()}
        with suppress(ValueError, OSError):
            measured = read_sealed_file(folder, METRICS_FILE, digest=digest)
            kept |= {} if measured is None else {METRICS_FILE: measured}
        return kept
    return {}


def ref_bytes(ref: Ref) -> bytes:
    """Return a ref as the bytes that are kept."""
    return ref.model_dump_json().encode()


def ref_name(stage_key: str) -> str:
    """Return the path of a kept ref in the folder of its digest."""
    return f"{_REFS}/{checked_digest(stage_key)}.json"


class RemovedFolder:
    """The records of removed artifacts in a store's folder."""

    def __init__(self, store_root: Path) -> None:
        self._root = store_root / REMOVED_FOLDER

    def keep_ref(self, ref: Ref) -> None:
        """Record a ref that is about to be removed; the caller holds its stage key."""
        path = self._root / checked_digest(ref.artifact.digest) / ref_name(ref.artifact.stage_key)
        make_folder(path.parent)
        replace_file(path, ref_bytes(ref))

    def keep_object(self, folder: Path, digest: str, cause: Cause) -> None:
        """Record an object that is about to be removed from ``folder``; the caller holds the object's lock.

        An object without manifest and ref was not an artifact.
        """
        target = self._root / checked_digest(digest)
        kept = what_stays(folder, digest)
        if not kept and not target.is_dir():
            return
        make_folder(target)
        for name, data in {**kept, CAUSE_FILE: cause.model_dump_json().encode()}.items():
            replace_file(target / name, data)


def _fetch(storage: "Readable", digest: str, folder: Path) -> None:
    """Copy the record of a digest; only known names are copied."""
    import obstore  # takes a moment to load

    prefix = f"{REMOVED_FOLDER}/{digest}/"
    for batch in obstore.list(storage.remote, prefix):
        for each in batch:
            name = str(each["path"]).partition(prefix)[2]
            stage_key = name.removeprefix(f"{_REFS}/").removesuffix(".json")
            is_ref = is_digest(stage_key) and name == ref_name(stage_key)
            if not is_ref and name not in (MANIFEST, METRICS_FILE, CAUSE_FILE):
                continue
            if each["size"] > MAX_MANIFEST_BYTES:
                raise ValueError(f"{prefix}{name}: is longer than {MAX_MANIFEST_BYTES} bytes")
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(bytes(obstore.get(storage.remote, str(each["path"])).bytes()))


def _read(folder: Path, digest: str) -> Removal | None:
    """Return the record in a local folder, checked."""
    where = f"{REMOVED_FOLDER}/{digest}"
    if not (folder / CAUSE_FILE).is_file():
        return None
    try:
        cause = Cause.model_validate_json((folder / CAUSE_FILE).read_bytes())
        files = measured = None
        if (folder / MANIFEST).is_file():
            files = {path: _file(record) for path, record in read_manifest(folder, digest=digest).items()}
            measured = read_sealed(folder, digest=digest).measured if METRICS_FILE in files else None
        refs = tuple(_refs(folder, digest, where))
    except ValidationError as error:
        raise ValueError(f"{where}: cannot be read as the record of a removed artifact") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{where}: {error}") from error
    return Removal(
        digest=digest,
        when=cause.when,
        why=cause.why,
        by=cause.by,
        files=files,
        measured=measured,
        refs=refs,
    )


def _refs(folder: Path, digest: str, where: str) -> Iterator[Ref]:
    for path in sorted((folder / _REFS).glob("*.json")):
        ref = Ref.model_validate_json(path.read_bytes())
        yield check_ref(ref, stage_key=path.stem, where=f"{where}/{_REFS}/{path.name}")
        if ref.artifact.digest != digest:
            raise ValueError(f"{_REFS}/{path.name}: is the ref of {ref.artifact.digest}")
        if (folder / MANIFEST).is_file():
            differing = contradictions(ref.artifact, read_sealed(folder, digest=digest))
            if differing:
                raise ValueError(f"{_REFS}/{path.name}: {differing[0]}")


def _file(record: Mapping[str, object]) -> RemovedFile:
    return RemovedFile.model_validate({"size": record["size"], "sha256": record["sha256"]})
