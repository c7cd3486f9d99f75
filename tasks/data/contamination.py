"""Find prompts that other datasets of the recipe hold out: rows with such a prompt, or nearly one, are not trained on."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vantage.schemas.conversations import first_words
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageJob
from vantage.schemas.steps import held_out_role, role_of_test_set
from vantage.tasks.data.rows import column_names, open_parquet
from vantage.tasks.data.splits import TEST, VALIDATION, prompt_position

ASKED_COLUMNS = ("prompt", "messages")
"""Columns with the question."""
_READ_ROWS = 1 << 14


def asked_text(row: Mapping[str, Any]) -> str:
    """Return the row's prompt; for a conversation, the user's first message."""
    turns = row.get("messages")
    text: str = row["prompt"] if turns is None else first_words(turns)
    return text


def positions_of(asked: Iterable[str]) -> Sequence[float]:
    """Return the numbers that decide the side of every row: the positions of the prompts."""
    return array("d", map(prompt_position, asked))


def contaminated(positions: Sequence[float], job: StageJob[PrepareData]) -> Any:
    """Return (N,) booleans: whether a test set has the row's prompt, up to case and white space."""
    if not job.work.test_sets:
        return np.zeros(len(positions), dtype=np.bool_)
    held_out = [
        position
        for i in range(len(job.work.test_sets))
        for position in positions_of(_asked_in(job.inputs[role_of_test_set(i)], TEST))
    ]
    return np.isin(np.asarray(positions), np.unique(np.asarray(held_out, dtype=np.float64)))


def held_out_elsewhere(job: StageJob[PrepareData]) -> Iterator[tuple[str, str]]:
    """Yield (dataset, text) of rows that test sets and the datasets in ``near_duplicates`` hold out."""
    for i, name in enumerate(job.work.test_sets):
        yield from ((name, text) for text in _asked_in(job.inputs[role_of_test_set(i)], TEST))
    near = job.work.data.near_duplicates
    for i, name in enumerate(near.held_out_of if near else ()):
        if name not in job.work.test_sets:
            folder = job.inputs[held_out_role(i)]
            yield from ((name, text) for side in (VALIDATION, TEST) for text in _asked_in(folder, side))


def _asked_in(folder: Path, side: str) -> Iterator[str]:
    columns = [column for column in ASKED_COLUMNS if column in column_names(folder, side)]
    with open_parquet(folder / f"{side}.parquet") as file:
        for batch in file.iter_batches(_READ_ROWS, columns=columns):
            yield from map(asked_text, batch.to_pylist())
