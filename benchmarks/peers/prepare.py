"""Prepare the material of a workload: models, rows, and the rows as Vantage's own data preparation leaves them."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.peers.counting_model import build_counting_model, build_reward
from benchmarks.peers.workloads import STATES, VARIANTS, Material, Workload, character, draw_lengths
from vantage.schemas.recipe.inputs import Content, Data, Generation, Shares, Split
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage

CONTENTS: dict[str, tuple[Content, tuple[str, ...]]] = {
    "sft": ("demonstrations", ("response",)),
    "reward": ("preferences", ("chosen", "rejected")),
}
"""Kind of workload → its rows and the columns of their responses; others have prompts alone."""
SHARES = Shares(validation=0.1, test=0.1)
SPARE = 2
"""Rows are made for each that is trained on, since a hash of the prompt decides which are held out."""


def prepare(workload: Workload, folder: Path) -> Path:
    """Make the material in an empty folder; returns its file."""
    content, columns = CONTENTS.get(workload.kind, ("prompts", ()))
    build_counting_model(folder / "model", seed=1, shape=workload.shape)
    build_reward(folder / "model", folder / "reward", seed=2)
    source = folder / "rows.jsonl"
    rows = make_rows(workload, columns, SPARE * workload.rows + 20)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data").mkdir()
    run_stage(
        StageJob(
            run_id="0001-bench",
            name="data.rows",
            attempt=1,
            stage_key="0" * 64,
            seed=1,
            work=PrepareData(
                content=content,
                data=Data(source=str(source), rows=workload.rows, split=Split(validation=1, test=1)),
                shares=SHARES,
                alone=True,
            ),
            generation=Generation(
                max_prompt_tokens=workload.prompt_tokens, max_response_tokens=workload.longest
            ),
            scratch=folder / "scratch",
            output=folder / "data",
        )
    )
    prepared = pq.read_table(folder / "data" / "train.parquet").to_pylist()
    if len(prepared) != workload.rows:
        raise ValueError(f"{workload.name}: {len(prepared)} rows were prepared, not {workload.rows}")
    material = Material(
        workload=workload,
        model=str(folder / "model"),
        reward=str(folder / "reward"),
        data=str(folder / "data"),
        prompts=[row["prompt"] for row in prepared],
        responses=[[row[column] for column in columns] for row in prepared],
    )
    material.write(folder / "material.json")
    return folder / "material.json"


def make_rows(workload: Workload, columns: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """Return random prompts, each of which asks for a response of the length drawn for it, and the given responses of
    such lengths.
    """
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(character(draw.randrange(STATES), draw.randrange(VARIANTS)) for _ in range(length))

    lengths = iter(draw_lengths(workload, count * max(1, len(columns))))
    rows = []
    for _ in range(count):
        of_row = [next(lengths) for _ in range(max(1, len(columns)))]
        asking = character(STATES - of_row[0], draw.randrange(VARIANTS))
        row = {"prompt": text(workload.prompt_tokens - 2) + asking}
        rows.append(row | {column: text(n - 1) for column, n in zip(columns, of_row, strict=False)})
    return rows
