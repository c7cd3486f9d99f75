"""Work out what a power loss leaves of a folder, from the order of the operations on it."""

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, Union

WATCHED = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "chmod")
"""Functions of ``os`` after each of which the power may go."""


Tree: TypeAlias = dict[str, Union[bytes, "Tree"]]
"""Name → content, or what is in the folder."""


class Disk:
    """A folder under watch: what is on the disk for sure, and what only the kernel knows, after each operation.

    A file's content is sure after fsync of the file, the names in a folder after fsync of the folder; nothing else
    is. Inodes are held open, so that none is used twice.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: dict[int, int] = {}
        self._names, self._contents = self._look()
        self._sure_names, self._sure_contents = dict(self._names), dict(self._contents)
        self.moments: list[Moment] = []

    def forget(self, path: Path) -> None:
        """Forget the path's name, which was never synced."""
        folder = path.parent.stat().st_ino
        self._sure_names[folder] = {
            name: inode for name, inode in self._sure_names[folder].items() if name != path.name
        }

    def watching(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def operate(*args: Any, **kwargs: Any) -> Any:
            names, contents = self._look()  # writes leave no trace of their own
            result = operation(*args, **kwargs)
            if name == "fsync":
                inode = os.fstat(args[0]).st_ino
                if inode in names:
                    self._sure_names[inode] = names[inode]
                else:
                    self._sure_contents[inode] = contents[inode]
            names, contents = self._look()
            self.moments.append(
                Moment(
                    self._root.stat().st_ino,
                    names,
                    contents,
                    dict(self._sure_names),
                    dict(self._sure_contents),
                )
            )
            return result

        return operate

    def _look(self) -> tuple[dict[int, dict[str, int]], dict[int, bytes]]:
        names: dict[int, dict[str, int]] = {}
        contents: dict[int, bytes] = {}
        for path in (self._root, *self._root.rglob("*")):
            status = path.lstat()
            if status.st_ino not in self._held:
                self._held[status.st_ino] = os.open(path, os.O_PATH)
            if stat.S_ISDIR(status.st_mode):
                names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                contents[status.st_ino] = path.read_bytes()
        return names, contents


class Moment:
    """What a power loss at one moment can leave."""

    def __init__(
        self,
        root: int,
        names: dict[int, dict[str, int]],
        contents: dict[int, bytes],
        sure_names: dict[int, dict[str, int]],
        sure_contents: dict[int, bytes],
    ) -> None:
        self._root, self._names, self._contents = root, names, contents
        self._sure_names, self._sure_contents = sure_names, sure_contents

    def survivors(self) -> Iterator[Tree]:
        """Yield each mixture, folder by folder, of the sure names and the newest; unsure content is lost, or kept."""
        unsure = [inode for inode in self._names if self._names[inode] != self._sure_names.get(inode, {})]
        for newest in itertools.product((False, True), repeat=len(unsure)):
            names = {
                **self._sure_names,
                **{inode: self._names[inode] for inode, new in zip(unsure, newest, strict=True) if new},
            }
            for contents in (self._sure_contents, {**self._sure_contents, **self._contents}):
                yield self._tree(self._root, names, contents)

    def _tree(self, folder: int, names: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
        is_folder = {**self._sure_names, **self._names}
        return {
            name: self._tree(inode, names, contents) if inode in is_folder else contents.get(inode, b"")
            for name, inode in names.get(folder, {}).items()
        }


def written(tree: Tree, folder: Path) -> Path:
    """Return the tree as files, below a new folder."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            written(content, folder / name)
        else:
            (folder / name).write_bytes(content)
    return folder
