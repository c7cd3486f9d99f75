"""Read rows of a folder that ``save_to_disk`` of the library ``datasets`` wrote, as the library loads them.

The library gets a folder of links to the data files, with descriptions that we write. So the digest of the data files
covers all that it reads, and a folder cannot name files elsewhere, a format that loads another library, or other types.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vantage.schemas.source_files import SAVED_STATE, data_limit, is_saved
from vantage.tasks.data.isolated_rows import isolated_rows
from vantage.tasks.data.row_faults import SourceRow, UnreadableFile
from vantage.tasks.data.row_worker import SAVED
from vantage.tasks.data.source_rows import read_rows_of

_DESCRIPTION = "dataset_info.json"
"""Equal to ``datasets.config.DATASET_INFO_FILENAME``."""
_PLAIN_STATE: dict[str, Any] = {
    "_fingerprint": "of-the-data-files",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}


def rows_of_files(
    source: str, files: Sequence[Path], ending: str, *, names: Sequence[str] | None = None
) -> Iterator[SourceRow]:
    """Return the rows of the files that a source names, or of copies of them, in the order of the files.

    Args:
        names: names of the files in messages, if ``files`` are copies.

    Raises:
        UnreadableFile, SourceTooLarge: as ``read_rows_of``; the message names the file if there are several.
    """
    named = [file.name for file in files] if names is None else names
    if is_saved(source):
        return _naming_the_damaged(saved_rows(files), files, named)
    if len(files) == 1:
        return read_rows_of(files[0], ending, data_limit())
    return chain.from_iterable(
        _naming(name, read_rows_of(file, ending, data_limit()))
        for name, file in zip(named, files, strict=True)
    )


def _naming(name: str, rows: Iterator[SourceRow]) -> Iterator[SourceRow]:
    try:
        yield from rows
    except UnreadableFile as error:
        raise UnreadableFile(f"{name}: {error}") from error


def _naming_the_damaged(
    rows: Iterator[SourceRow], files: Sequence[Path], names: Sequence[str]
) -> Iterator[SourceRow]:
    """Yield the rows. If they cannot be read, each file is read alone, to name the first damaged one."""
    try:
        yield from rows
    except UnreadableFile as error:
        for name, file in zip(names, files, strict=True):
            try:
                for _ in read_rows_of(file, ".arrow", data_limit()):
                    pass
            except UnreadableFile:
                raise UnreadableFile(f"{name}: {error}") from error
        raise


def saved_rows(files: Sequence[Path]) -> Iterator[SourceRow]:
    """Yield the rows of one saved dataset.

    Args:
        files: its data files in their order.

    Raises:
        UnreadableFile: the library cannot load the files.
    """
    with TemporaryDirectory() as folder:
        links = [Path(folder) / f"data-{number:05}.arrow" for number in range(len(files))]
        for link, file in zip(links, files, strict=True):
            link.symlink_to(file.resolve())
        state = {**_PLAIN_STATE, "_data_files": [{"filename": link.name} for link in links]}
        (Path(folder) / SAVED_STATE).write_text(json.dumps(state))
        (Path(folder) / _DESCRIPTION).write_text("{}")
        yield from isolated_rows(SAVED, Path(folder), data_limit())
