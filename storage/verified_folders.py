"""Remember the sealed folders that this process has read and found intact."""

from pathlib import Path

from vantage.storage.sealed_folders import find_problems, folder_stamp


class VerifiedFolders:
    """Sealed folders that were found intact. Each is read again only if an inode, size or time in it has changed since.

    A sweep asks for the same gigabytes once for each of its runs.
    """

    def __init__(self) -> None:
        self._intact: dict[Path, object] = {}
        """Folder → its stamp when every byte was last read and intact."""

    def problems(self, folder: Path, *, digest: str) -> list[str]:
        """Return the problems of the folder's files (set of files, sizes, sha256, links); empty: intact."""
        try:
            before = folder_stamp(folder)
        except OSError:
            before = None  # the problems contain the reason
        if before is not None and self._intact.get(folder) == before:
            return []
        problems = find_problems(folder, digest=digest)
        if before is not None and not problems:
            self._intact[folder] = before
        return problems
