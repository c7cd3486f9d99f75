"""Record a small pipeline in the ledger, and read what MLflow then holds."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from vantage.ledger.journal import Entry
from vantage.ledger.operations import Input
from vantage.ledger.run_ledger import Ledger
from vantage.schemas.records.artifacts import (
    Artifact,
    Dataset,
    Evaluation,
    PolicyCheckpoint,
    RewardModel,
    ValueModel,
)
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.usage import Usage
from vantage.schemas.records.verdicts import Verdict

ROOT = Path(__file__).parents[2]


A = TypeVar("A", bound=Artifact)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def client_of(workspace: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")


def artifact(
    cls: type[A], name: str, inputs: dict[str, Input], *, digest: str | None = None, **fields: Any
) -> A:
    """Return an artifact called ``name``; ``digest`` is that of a sealed folder, where there is one."""
    digest = digest or sha(name)
    if cls in (PolicyCheckpoint, RewardModel, ValueModel):
        fields["tokenizer_digest"] = sha("tokenizer")
    return cls(
        uri=f"objects/{digest}",
        digest=digest,
        stage_key=sha(f"key of {name}"),
        parents={role: given.artifact.digest for role, given in inputs.items()},
        **fields,
    )


DATA = artifact(Dataset, "data", {}, content="demonstrations", metrics={"train_rows": 200.0})
MODEL = artifact(PolicyCheckpoint, "model", {})
SFT_INPUTS = {"init": Input(stage="model", artifact=MODEL), "data": Input(stage="data.demos", artifact=DATA)}
SFT = artifact(PolicyCheckpoint, "sft", SFT_INPUTS, metrics={"test_nll": 0.4, "undefined": None})
EVALUATION_INPUTS = {"candidate": Input(stage="sft", artifact=SFT), "prompts": SFT_INPUTS["data"]}
EVALUATION = artifact(Evaluation, "evaluation", EVALUATION_INPUTS, metrics={"accuracy": 0.5})
VERDICT = Verdict(
    passed=True,
    metric="test_nll",
    measured=0.4,
    relation="<=",
    threshold=1.0,
    on_fail="stop",
    evidence={"test_nll": 0.4},
)
STAGES: dict[str, tuple[str, dict[str, Input], Artifact]] = {
    "model": ("import_model", {}, MODEL),
    "data.demos": ("prepare_data", {}, DATA),
    "sft": ("sft", SFT_INPUTS, SFT),
    "evaluation": ("evaluation", EVALUATION_INPUTS, EVALUATION),
}
SOURCES = {"data.demos": sha("demonstrations.jsonl"), "model": sha("the model's folder")}
ORIGIN = {"mlflow.user": "ada", "mlflow.source.git.commit": "c0ffee", "vantage.git.dirty": "false"}
RECIPE = {"recipe": "tiny", "seed": 17, "stages": {"sft": {"kind": "sft", "epochs": 2.0}}}
JOURNAL = [
    Entry(step=step, time=1700000000.5 + step, metrics={"loss": 2.0 / (step + 1)}) for step in range(5)
]
JOURNAL_CURVE = [(step, 1700000000500 + 1000 * step, 2.0 / (step + 1)) for step in range(5)]


def responses(folder: Path) -> Path:
    """Write the responses of both models as an evaluation keeps them, row by row, and return the folder."""
    folder.mkdir(exist_ok=True)
    for role, response, judgement in (("baseline", "2|3", 0.0), ("candidate", "#2\u4e2d", 1.0)):
        row = {"prompt": "1+1?", "response": response, "ended": True, "judgement": judgement}
        pq.write_table(pa.Table.from_pylist([row, row]), folder / f"{role}.parquet")
    return folder


USAGE = Usage(
    times=(1_700_000_001_000, 1_700_000_011_000), readings={"cpu_utilization_percentage": (None, 87.5)}
)


def tell_stage(ledger: Ledger, stage: str, *, attempt: int = 1) -> None:
    kind, inputs, made = STAGES[stage]
    ledger.open_stage(
        stage,
        kind=kind,
        stage_key=made.stage_key,
        attempt=attempt,
        params={"epochs": 2.0},
        inputs=inputs,
        source_sha256=SOURCES.get(stage),
    )
    if stage == "sft":
        ledger.send_metrics(stage, JOURNAL)
        ledger.record_verdicts(stage, [VERDICT])
    folder = responses(ledger.workspace / "responses") if stage == "evaluation" else None
    ledger.finish_stage(
        stage,
        "completed",
        artifact=made,
        folder=folder,
        provenance={"device": "cpu"},
        energy=Energy(gpu_joules=1234.56) if stage == "sft" else None,
        usage=USAGE if stage == "sft" else None,
    )


def tell_reuse(ledger: Ledger, stage: str) -> None:
    kind, inputs, made = STAGES[stage]
    ledger.record_reuse(
        stage,
        kind=kind,
        stage_key=made.stage_key,
        params={"epochs": 2.0},
        inputs=inputs,
        artifact=made,
        source_sha256=SOURCES.get(stage),
    )


def tell_run(ledger: Ledger, run_id: str) -> None:
    ledger.open_run(run_id, "tiny", RECIPE, origin=ORIGIN)
    for stage in STAGES:
        tell_stage(ledger, stage)
    ledger.finish_run("completed")


def record_run(workspace: Path, run_id: str, tell: Callable[[Ledger, str], None] = tell_run) -> None:
    with Ledger(None, workspace, "tiny") as ledger:
        tell(ledger, run_id)
        assert ledger.flush()
    assert refused(workspace) == []


def refused(workspace: Path) -> list[str]:
    return [
        json.loads(line)["error"]
        for path in sorted(workspace.glob("runs/*/ledger/refused.jsonl"))
        for line in path.read_text().splitlines()
    ]


def runs_of(client: MlflowClient, run_id: str) -> dict[str, Run]:
    """Return stage → its run, "" → the whole run's; two runs for one stage are an error."""
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.`vantage.run_id` = '{run_id}'")
    found = {run.data.tags.get("vantage.stage", ""): client.get_run(run.info.run_id) for run in runs}
    assert len(found) == len(runs)
    return found


def curve(client: MlflowClient, run: Run, metric: str) -> list[tuple[int, int, float]]:
    history = client.get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.timestamp, point.value) for point in history)


def snapshot(client: MlflowClient, run_id: str) -> dict[str, Any]:
    """Return everything of a run in MLflow, with MLflow's own ids replaced by ours."""
    runs = runs_of(client, run_id)
    experiment_id = runs[""].info.experiment_id
    models = client.search_logged_models([experiment_id])
    ours = {run.info.run_id: f"run of {stage}" for stage, run in runs.items()}
    ours |= {model.model_id: f"model of {model.tags['vantage.stage']}" for model in models}
    assert len(set(ours.values())) == len(ours), "one entry each"

    def used(run: Run) -> dict[str, list[str]]:
        """Return the datasets and models that a run read, and the models that it made."""
        assert run.inputs is not None
        assert run.outputs is not None
        return {
            "datasets": [given.dataset.digest for given in run.inputs.dataset_inputs],
            "models": sorted(ours[given.model_id] for given in run.inputs.model_inputs),
            "made": sorted(ours[made.model_id] for made in run.outputs.model_outputs),
        }

    def renamed(value: str) -> str:
        for theirs, name in ours.items():
            value = value.replace(theirs, name)
        return value

    return {
        stage: {
            "status": run.info.status,
            "times": (run.info.start_time, run.info.end_time),
            "params": run.data.params,
            "tags": {name: renamed(value) for name, value in run.data.tags.items()},
            "curves": {metric: curve(client, run, metric) for metric in run.data.metrics},
            **used(run),
        }
        for stage, run in runs.items()
    } | {
        ours[model.model_id]: (
            model.status.value,
            model.params,
            {name: renamed(value) for name, value in model.tags.items()},
        )
        for model in models
    }
