"""The rows of a dataset that a stage made of its own samples, held to the rules before they become an artifact.

Stages run where pandera is not installed, so the check is here, between a stage's end and its commit. It reads the
files in Arrow batches: memory holds one of them.
"""

from pathlib import Path

from tasks.data.splits import SPLITS

BATCH_ROWS = 10_000


def check_dataset(folder: Path, content: str, *, step: str) -> None:
    """Refuse a dataset with a row that breaks a rule of ``schemas.tables``.

    Rows may repeat: two samples of one prompt can be the same.

    Args:
        folder: holds one Parquet file a split.
        content: what the rows are, as in ``schemas.steps.CONTENT_COLUMNS``.
        step: who made it, for the message.

    Raises:
        schemas.tables.UnusableTable: which split, how many rows, why, and the first of them.
        FileNotFoundError: a split's file is not there.
    """
    import pyarrow.parquet as pq  # both take a second to import, and few runs collect pairs

    from schemas.tables import UnusableTable, usable_rows

    for split in SPLITS:
        path = folder / f"{split}.parquet"
        with pq.ParquetFile(path) as file:
            try:
                kept, report_of = usable_rows(
                    file.iter_batches(BATCH_ROWS), content=content, allow_repeats=True
                )
                for _ in kept:  # pandera looks at every batch as it passes
                    pass
            except UnusableTable as error:
                raise UnusableTable(f"{step}: {path.name}: {error}") from error
        report = report_of()
        if report.num_dropped:
            raise UnusableTable(f"{step}: {path.name}: {report}")
