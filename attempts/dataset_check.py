"""Validate a dataset that a stage collected, before it becomes an artifact.

Stages may run without pandera, so the check is here, between a stage's end and its commit. It reads the files in Arrow
batches: memory holds one batch.
"""

from pathlib import Path

from vantage.tasks.data.splits import SPLITS

BATCH_ROWS = 10_000


def check_dataset(folder: Path, content: str, *, step: str) -> None:
    """Check every row against the rules of ``vantage.schemas.row_rules``.

    Rows may repeat: two samples of one prompt can be the same.

    Args:
        folder: folder with one Parquet file for each split.
        content: content of the rows, as in ``vantage.schemas.steps.CONTENT_COLUMNS``.
        step: the step that made the dataset, for the message.

    Raises:
        vantage.schemas.row_rules.UnusableTable: a row breaks a rule; the error has the split, numbers, reasons and
            first rows.
        FileNotFoundError: a split's file is missing.
    """
    # These modules take a second to import, and few runs collect pairs
    from vantage.schemas.row_rules import UnusableTable
    from vantage.schemas.tables import usable_rows
    from vantage.tasks.data.rows import open_parquet

    for split in SPLITS:
        path = folder / f"{split}.parquet"
        with open_parquet(path) as file:
            try:
                kept, report_of = usable_rows(
                    file.iter_batches(BATCH_ROWS), content=content, allow_repeats=True
                )
                for _ in kept:  # pandera checks every batch in the iterator
                    pass
            except UnusableTable as error:
                raise UnusableTable(f"{step}: {path.name}: {error}") from error
        report = report_of()
        if report.num_dropped:
            raise UnusableTable(f"{step}: {path.name}: {report}")
