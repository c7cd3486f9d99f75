"""Read rows of a folder that ``save_to_disk`` of the library ``datasets`` wrote, as the library loads them."""

from collections.abc import Iterator
from pathlib import Path

from vantage.tasks.data.arrow_rows import rows_of_batch
from vantage.tasks.data.row_faults import SourceRow, UnreadableFile

BATCH_ROWS = 1000
"""Rows that are Python objects at the same time."""


def library_rows(folder: Path) -> Iterator[SourceRow]:
    """Yield the rows of one saved dataset.

    Raises:
        UnreadableFile: the library cannot load them.
    """
    import datasets  # takes a second, which other data need not wait for

    try:
        saved = datasets.load_from_disk(str(folder), keep_in_memory=False).with_format("arrow")
        if len(set(saved.column_names)) < len(saved.column_names):
            raise UnreadableFile("two of its columns have one name; rename one")
        for table in saved.iter(BATCH_ROWS):
            for batch in table.to_batches():
                yield from rows_of_batch(batch)
    except UnreadableFile:
        raise
    except Exception as error:  # the library raises errors of Arrow, of JSON and of its own
        first_line = (str(error).splitlines() or [""])[0]
        raise UnreadableFile(
            f"datasets.load_from_disk refuses it ({type(error).__name__}: {first_line}); write it again with save_to_disk"
        ) from error
