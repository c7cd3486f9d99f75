"""Rows of a folder that ``save_to_disk`` of the library ``datasets`` wrote, as the library loads them.

The library gets a folder of links to the data files, with descriptions that we write: all that it reads is in the digest of
the data files, and a folder cannot name files elsewhere, a format that loads another library, or other types.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vantage.schemas.source_files import SAVED_STATE, data_limit, is_saved
from vantage.tasks.data.arrow_rows import rows_of_batch
from vantage.tasks.data.row_faults import SourceRow, UnreadableFile
from vantage.tasks.data.source_rows import read_rows_of

BATCH_ROWS = 1000
"""Rows that are Python objects at the same time."""
_PLAIN_STATE: dict[str, Any] = {
    "_fingerprint": "of-the-data-files",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}


def rows_of_files(source: str, files: Sequence[Path], ending: str) -> Iterator[SourceRow]:
    """Return the rows of the files that a source names, or of copies of them, in the order of the files.

    Raises:
        UnreadableFile, SourceTooLarge: as ``read_rows_of``.
    """
    if is_saved(source):
        return saved_rows(files)
    return chain.from_iterable(read_rows_of(file, ending, data_limit()) for file in files)


def saved_rows(files: Sequence[Path]) -> Iterator[SourceRow]:
    """Yield the rows of one saved dataset.

    Args:
        files: its data files in their order.

    Raises:
        UnreadableFile: the library cannot load them.
    """
    import datasets  # costs a second, which other data does not pay

    with TemporaryDirectory() as folder:
        links = [Path(folder) / f"data-{number:05}.arrow" for number in range(len(files))]
        for link, file in zip(links, files, strict=True):
            link.symlink_to(file.resolve())
        state = {**_PLAIN_STATE, "_data_files": [{"filename": link.name} for link in links]}
        (Path(folder) / SAVED_STATE).write_text(json.dumps(state))
        (Path(folder) / datasets.config.DATASET_INFO_FILENAME).write_text("{}")
        try:
            saved = datasets.load_from_disk(folder, keep_in_memory=False).with_format("arrow")
            if len(set(saved.column_names)) < len(saved.column_names):
                raise UnreadableFile("two of its columns have one name; rename one")
            for table in saved.iter(BATCH_ROWS):
                for batch in table.to_batches():
                    yield from rows_of_batch(batch)
        except UnreadableFile:
            raise
        except Exception as error:  # the library passes on those of Arrow, of JSON and of its own types
            first_line = (str(error).splitlines() or [""])[0]
            raise UnreadableFile(
                f"datasets.load_from_disk refuses it ({type(error).__name__}: {first_line}); write it again with save_to_disk"
            ) from error
