"""Keep a copy of an attempt's scratch folder in the bucket, so that another machine can go on from its last checkpoint.

The process that watches the computation copies meanwhile: a checkpoint is a sealed folder that appears by a rename, so
it is never seen half-written. Its manifest is sent last; a checkpoint without one is not fetched. The files beside the
checkpoints (the journal, lists of finished batches) are sent before them, so they reach at least as far.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from stat import S_ISREG

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore as Remote

from vantage.storage.durable_files import make_folder
from vantage.storage.sealed_folders import MANIFEST, check_path

COPY_SECONDS = 10.0
"""Seconds between two copies of the folder; unchanged files are not sent again."""

_SAVING = "saving"
"""The folder of a checkpoint that is being written."""

_log = logging.getLogger(__name__)


class ScratchCopy:
    """The copy of one scratch folder."""

    def __init__(self, remote: Remote, prefix: str, folder: Path) -> None:
        self._remote = remote
        self._prefix = prefix
        self._folder = folder
        self._sent: dict[str, tuple[int, int]] = {}
        """Path → size and time of change of the version that was last sent."""

    def exists(self) -> bool:
        """Return whether the bucket has any file of the copy."""
        return any(batch for batch in obstore.list(self._remote, f"{self._prefix}/", chunk_size=1))

    def is_ahead(self) -> bool:
        """Return whether the bucket has a complete checkpoint newer than all in the folder: another machine went on."""
        here = {path.parent.name for path in self._folder.glob(f"*/checkpoint-*/{MANIFEST}")}
        there = {PurePosixPath(path).parent.name for path in self._paths() if path.endswith(f"/{MANIFEST}")}
        return max(there, default="") > max(here, default="")

    @contextmanager
    def kept_up(self, names: Sequence[str]) -> Iterator[None]:
        """Send changes while the block runs, in a thread of its own, and once more at its end.

        ``names`` are the files and folders directly in the scratch folder that are sent. If lines move from one file to
        another, name the file that they leave first, so that no line is lost.
        """
        done = threading.Event()

        def run() -> None:
            while not done.wait(COPY_SECONDS):
                self._send_or_warn(names)

        thread = threading.Thread(target=run, name="scratch copy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._send_or_warn(names)

    def send(self, names: Sequence[str]) -> None:
        """Send what has changed since the last call, then remove what the folder no longer has."""
        found = dict(self._files(names))
        changed = [path for path, state in found.items() if self._sent.get(path) != state]
        # The journal before the checkpoints, and a checkpoint's manifest after its files; otherwise in the order of the names.
        for path in sorted(changed, key=lambda path: ("/" in path, PurePosixPath(path).name == MANIFEST)):
            with suppress(FileNotFoundError):  # an old checkpoint was removed meanwhile
                obstore.put(self._remote, f"{self._prefix}/{path}", self._folder / path)
                self._sent[path] = found[path]
        for path in [path for path in self._sent if path not in found]:
            # The manifest is removed first, so that no half-removed checkpoint is fetched.
            self._delete(path)
            del self._sent[path]

    def fetch(self) -> None:
        """Download the copy to the folder, which must not exist; a checkpoint without its manifest is left out."""
        paths = self._paths()
        if not paths:
            return
        sealed = {str(PurePosixPath(path).parent) for path in paths if PurePosixPath(path).name == MANIFEST}
        new = self._folder.with_name(f"{self._folder.name}.fetched-{os.getpid()}")
        shutil.rmtree(new, ignore_errors=True)
        try:
            make_folder(new)
            for path in paths:
                if _checkpoint_of(path) in sealed or _checkpoint_of(path) is None:
                    self._download(path, new)
            new.rename(self._folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def remove(self) -> None:
        """Remove the copy."""
        for path in self._paths():
            self._delete(path)

    def _send_or_warn(self, names: Sequence[str]) -> None:
        """Send the changes; if the bucket does not answer, warn, and let the computation go on."""
        try:
            self.send(names)
        except (BaseError, OSError) as error:
            _log.warning("%s could not be copied to the bucket: %s", self._folder, error)

    def _paths(self) -> list[str]:
        """Return paths in the bucket, relative to the scratch folder."""
        listed = obstore.list(self._remote, f"{self._prefix}/")
        return [str(each["path"]).rpartition(f"{self._prefix}/")[2] for batch in listed for each in batch]

    def _files(self, names: Sequence[str]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield path, size and time of change."""
        for path in (self._folder / name for name in names):
            for file in path.rglob("*") if path.is_dir() else [path]:
                with suppress(FileNotFoundError):
                    state = file.lstat()
                    if S_ISREG(state.st_mode) and _SAVING not in file.parts:
                        yield file.relative_to(self._folder).as_posix(), (state.st_size, state.st_mtime_ns)

    def _download(self, path: str, folder: Path) -> None:
        check_path(path)
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(NotFoundError, FileNotFoundError), target.open("wb") as file:
            for part in obstore.get(self._remote, f"{self._prefix}/{path}").stream():
                file.write(part)

    def _delete(self, path: str) -> None:
        with suppress(NotFoundError, FileNotFoundError):
            obstore.delete(self._remote, f"{self._prefix}/{path}")


def _checkpoint_of(path: str) -> str | None:
    """Return the folder of a checkpoint's file, ``checkpoints/checkpoint-…``; None for other files."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[:2]) if len(parts) > 2 and parts[1].startswith("checkpoint-") else None
