"""Source files of a recipe: formats, size limits, and copying with a hash in one pass.

A file may have any size and may change at any moment. So its size is checked before it is read, no more than the limit
is read, and stages use a copy that was made while hashing.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TEXT_FORMATS = (".json", ".jsonl", ".csv")
PLAIN_FORMATS = (".json", ".jsonl", ".parquet", ".csv", ".arrow")
PACKINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstandard"}
"""Ending of a packed text file → its packing."""
DATA_FORMATS = (*PLAIN_FORMATS, *(f"{plain}{packed}" for packed in PACKINGS for plain in TEXT_FORMATS))
"""Endings of data files."""

SAVED_STATE, SAVED_FILES = "state.json", "data-*.arrow"
"""Files that ``save_to_disk`` of ``datasets`` writes into a folder."""

_CHUNK = 1 << 20
_GIB = 1 << 30


class SourceTooLarge(ValueError):
    """A file is larger than its limit."""


class SourceChanged(ValueError):
    """A file has changed since the run was planned."""


@dataclass(frozen=True)
class SizeLimit:
    """The largest size in bytes, and how to raise it."""

    num_bytes: int
    remedy: str

    def check(self, path: Path | str, size: int) -> None:
        """Refuse a file of so many bytes if they are too many.

        Raises:
            SourceTooLarge: ``size`` exceeds the limit.
        """
        if size > self.num_bytes:
            raise SourceTooLarge(
                f"{path} has {size / _GIB:,.1f} GiB, and at most {self.num_bytes / _GIB:g} GiB are read; {self.remedy}"
            )


VERIFIER_LIMIT = SizeLimit(1 << 20, "a verifier is one file of Python")


def data_limit() -> SizeLimit:
    """Return the limit of a data file, compressed and uncompressed: 16 GiB, or ``VANTAGE_MAX_DATA_GIB``."""
    return _limit_in("VANTAGE_MAX_DATA_GIB", 16.0)


def model_limit() -> SizeLimit:
    """Return the limit of all files of a model together: 512 GiB, or ``VANTAGE_MAX_MODEL_GIB``."""
    return _limit_in("VANTAGE_MAX_MODEL_GIB", 512.0)


def _limit_in(variable: str, default: float) -> SizeLimit:
    text = os.environ.get(variable, "")
    try:
        gib = float(text) if text else default
        if not 0.0 < gib < 2**30:
            raise ValueError
    except ValueError:
        raise ValueError(f"{variable}={text!r} is no number of GiB above 0; correct it or unset it") from None
    return SizeLimit(int(gib * _GIB), f"check the file, or raise {variable}")


def data_format(source: Path | str) -> str | None:
    """Return the element of ``DATA_FORMATS`` that the name ends with, ignoring case; None: none."""
    name = Path(source).name.lower()
    return next((ending for ending in DATA_FORMATS if name.endswith(ending)), None)


def files_of(source: Path | str) -> list[Path]:
    """Return the files that a source of data names, in the order of their names: itself, or those that its last part matches.

    ``*`` and ``?`` are wildcards unless a file has exactly this name.
    """
    path = Path(source)
    if not set("*?") & set(path.name) or path.exists():
        return [path]
    return sorted(found for found in path.parent.glob(path.name) if found.is_file())


def saved_files(path: Path) -> Path:
    """Return the pattern of the files in a folder that ``save_to_disk`` of ``datasets`` wrote; any other path unchanged.

    A folder whose ``state.json`` lists other files than there are is also returned unchanged, as when one dataset was
    written over another.
    """
    try:
        if not (path / SAVED_STATE).is_file():  # reading a pipe would wait for a writer
            return path
        listed = json.loads((path / SAVED_STATE).read_bytes())["_data_files"]
        names = sorted(str(each["filename"]) for each in listed)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return path
    found = sorted(each.name for each in path.glob(SAVED_FILES))
    return path / SAVED_FILES if names and names == found else path


def is_saved(source: Path | str) -> bool:
    """Return whether the source is the pattern that ``saved_files`` returns of a folder."""
    pattern = Path(source)
    return pattern.name == SAVED_FILES and saved_files(pattern.parent) == pattern


def why_not_saved(folder: Path) -> str | None:
    """Return why ``saved_files`` finds no files in a folder that ``save_to_disk`` wrote, and the remedy; None: it is no such folder."""
    with suppress(OSError):  # a name that is too long is no folder's
        return _why_not_saved(folder)
    return None


def _why_not_saved(folder: Path) -> str | None:
    if (folder / SAVED_STATE).is_file():
        return f"its {SAVED_STATE} lists other files than {SAVED_FILES}; write it again with save_to_disk into a new folder"
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(each.parent.name for each in folder.glob(f"*/{SAVED_STATE}"))
        return f"it holds the splits {', '.join(splits) or 'of no dataset'}; name the folder of one, {folder / (splits or ['SPLIT'])[0]}"
    return None


def digest_of_files(digests: Sequence[str]) -> str:
    """Return one digest for several files: sha256 of their sha256s, one per line; for a single file its own sha256."""
    [*_, last] = digests  # an empty list raises here
    return (
        last if len(digests) == 1 else hashlib.sha256("".join(f"{d}\n" for d in digests).encode()).hexdigest()
    )


def files_in(folder: Path) -> list[str]:
    """Return all files in a folder and the folders in it, from the folder on, sorted; hidden ones and compiled Python are no content."""
    found = []
    for place, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [each for each in folders if not each.startswith(".") and each != "__pycache__"]
        found += [
            (Path(place) / name).relative_to(folder).as_posix() for name in files if not name.startswith(".")
        ]
    return sorted(found)


def digest_of_folder(folder: Path, *, copy_to: Path | None = None) -> str:
    """Return the sha256 of the names and sha256s of all files in a folder; with ``copy_to``, of what was copied there.

    Raises:
        SourceTooLarge: together the files exceed the limit of data.
        OSError: a file cannot be read, or is no regular file.
    """
    limit, total, digest = data_limit(), 0, hashlib.sha256()
    for name in files_in(folder):
        total += (folder / name).stat().st_size
        limit.check(folder, total)
        if copy_to is None:
            content = hash_file(folder / name, limit)
        else:
            (copy_to / name).parent.mkdir(parents=True, exist_ok=True)
            content = copy_hashed(folder / name, copy_to / name, limit)
        digest.update(f"{content} ".encode() + os.fsencode(name) + b"\0")
    return digest.hexdigest()


def hash_file(path: Path, limit: SizeLimit) -> str:
    """Return the sha256 of a regular file, in lower-case hexadecimal.

    Raises:
        SourceTooLarge: the file exceeds the limit; this is checked before the file is read.
        OSError: the file cannot be read, or is no regular file.
    """
    return _hash(path, limit, None)


def copy_hashed(path: Path, target: Path, limit: SizeLimit) -> str:
    """Copy a regular file to ``target``; returns the sha256 of exactly what was copied. Raises as ``hash_file``."""
    with target.open("wb") as copy:
        return _hash(path, limit, copy)


def check_unchanged(source: str, *, planned: str | None, found: str) -> None:
    """Refuse a source whose digest has changed since the run was planned.

    Raises:
        SourceChanged: the digests differ; ``planned`` None: unknown.
    """
    if planned is not None and planned != found:
        raise SourceChanged(
            f"source={source!r} has changed since the run was planned: its sha256 was {planned[:12]}… and is "
            f"{found[:12]}… now; leave it alone while a run begins, and run the same command again"
        )


def _hash(path: Path, limit: SizeLimit, copy: BinaryIO | None) -> str:
    digest, size = hashlib.sha256(), 0
    with _opened(path, limit) as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            limit.check(path, size)  # it may grow while it is read
            digest.update(chunk)
            if copy is not None:
                copy.write(chunk)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path, limit: SizeLimit) -> Iterator[BinaryIO]:
    # Without O_NONBLOCK, opening a named pipe waits for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(f"{path} is not a regular file; name one")
        limit.check(path, status.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)
