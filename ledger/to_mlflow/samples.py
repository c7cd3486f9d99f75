"""Write an evaluation's samples to MLflow: as a table, and as a page."""

import json
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
from mlflow.tracking import MlflowClient

from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.model_card import stage_and_measurements
from vantage.ledger.samples_page import samples_page

TABLE = "samples.json"
PAGE = "samples.html"
MAX_ROWS = 1000
"""Most rows in MLflow; the store has all."""

_TABLES = "mlflow.loggedArtifacts"
"""Tag by which MLflow finds the tables of a run."""


def log_samples(client: MlflowClient, run_id: str, stage: StageEntry) -> None:
    """Log the responses of candidate and baseline, row by row and side by side, if the store has them; idempotent.

    MLflow's ``log_table`` appends to an existing table, and would duplicate the rows.
    """
    files = [Path(stage.folder or "", f"{role}.parquet") for role in ("candidate", "baseline")]
    if stage.folder is None or not all(file.is_file() for file in files):
        return
    candidate, baseline = (pq.read_table(file).slice(0, MAX_ROWS).to_pylist() for file in files)
    judgements = [name for name in ("judgement", "also_judgement") if candidate and name in candidate[0]]
    columns = ["prompt"]
    for role in ("baseline", "candidate"):
        columns += [role, *(f"{role}_{name}" for name in judgements)]
    data = [
        [ours["prompt"], *(side[name] for side in (theirs, ours) for name in ("response", *judgements))]
        for ours, theirs in zip(candidate, baseline, strict=True)
    ]
    client.log_text(run_id, json.dumps({"columns": columns, "data": data}, ensure_ascii=False), TABLE)
    client.log_text(run_id, samples_page(f"Samples of {stage.name}", candidate, baseline), PAGE)
    client.set_tag(run_id, _TABLES, json.dumps([{"path": TABLE, "type": "table"}]))


def example_prompt(entry: RunEntry, stage: str) -> str | None:
    """Return a prompt on which an evaluation of the run has measured the stage's policy; None: no file has one."""
    for each in stage_and_measurements(entry, stage):
        file = Path(each.folder or "", "candidate.parquet")
        if each.kind != "evaluation" or each.folder is None or not file.is_file():
            continue
        with suppress(OSError, ValueError):  # the file is damaged or has no prompts; any text shows the form
            for batch in pq.ParquetFile(file).iter_batches(1, columns=["prompt"]):
                return str(batch.column(0)[0])
    return None
