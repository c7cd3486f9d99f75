"""The ledger against real MLflow: a SQLite database, a server that comes and goes, answers that are lost."""

import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from schemas.artifacts import Artifact, Dataset, Evaluation, PolicyCheckpoint, RewardModel
from schemas.verdicts import Verdict
from tasks.journal import Entry
from tasks.ledger import MLFLOW_ENVIRONMENT, Ledger, without_password
from tasks.ledger_entries import Input, OpenRun, to_json
from tasks.ledger_mlflow import Sending, Server
from tasks.outbox import Outbox

ROOT = Path(__file__).parents[2]

MAKE_DATABASE = """
import sys
from pathlib import Path
from tasks.ledger import Ledger
ledger = Ledger(None, Path(sys.argv[1]), "made-by-two")
ledger.open_run(sys.argv[2], "two", {})
sys.exit(0 if ledger.close(120.0) else 1)
"""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def client_of(workspace: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace's database as two processes made it that started at once."""
    workspace = tmp_path_factory.mktemp("database")
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_DATABASE, str(workspace), f"000{i}-two-aaaaaa"],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (1, 2)
    ]
    said = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said == ["", ""]
    found = client_of(workspace)
    experiment = found.get_experiment_by_name("made-by-two")
    assert experiment is not None
    assert len(found.search_runs([experiment.experiment_id])) == 2
    return workspace / "mlflow.db"


@pytest.fixture
def workspace(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ready database; nothing of the caller's MLflow is touched."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path


# A small pipeline, told


def artifact(cls: type[Any], name: str, inputs: dict[str, Input], **fields: Any) -> Any:
    if cls in (PolicyCheckpoint, RewardModel):
        fields["tokenizer_digest"] = sha("tokenizer")
    return cls(
        uri=f"objects/{sha(name)}",
        digest=sha(name),
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
RECIPE = {"recipe": "tiny", "seed": 17, "stages": {"sft": {"kind": "sft", "epochs": 2.0}}}
JOURNAL = [
    Entry(step=step, time=1700000000.5 + step, metrics={"loss": 2.0 / (step + 1)}) for step in range(5)
]


def tell_stage(ledger: Ledger, stage: str, *, attempt: int = 1) -> None:
    kind, inputs, made = STAGES[stage]
    ledger.open_stage(
        stage, kind=kind, stage_key=made.stage_key, attempt=attempt, params={"epochs": 2.0}, inputs=inputs
    )
    if stage == "sft":
        ledger.send_metrics(stage, JOURNAL)
        ledger.record_verdicts(stage, [VERDICT])
    ledger.finish_stage(stage, "completed", artifact=made, provenance={"device": "cpu"})


def tell_reuse(ledger: Ledger, stage: str) -> None:
    kind, inputs, made = STAGES[stage]
    ledger.record_reuse(
        stage, kind=kind, stage_key=made.stage_key, params={"epochs": 2.0}, inputs=inputs, artifact=made
    )


def tell_run(ledger: Ledger, run_id: str) -> None:
    ledger.open_run(run_id, "tiny", RECIPE)
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
    """Stage → its run, "" → the whole run's; two runs for one stage are an error."""
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.`vantage.run_id` = '{run_id}'")
    found = {run.data.tags.get("vantage.stage", ""): client.get_run(run.info.run_id) for run in runs}
    assert len(found) == len(runs)
    return found


def curve(client: MlflowClient, run: Run, metric: str) -> list[tuple[int, int, float]]:
    history = client.get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.timestamp, point.value) for point in history)


JOURNAL_CURVE = [(step, 1700000000500 + 1000 * step, 2.0 / (step + 1)) for step in range(5)]


def test_making_a_ledger_loads_neither_mlflow_nor_torch(tmp_path: Path) -> None:
    probe = (
        "import sys; from pathlib import Path; from tasks.ledger import Ledger; "
        f"Ledger(None, Path({str(tmp_path)!r}), 'x'); "
        "print({'mlflow', 'torch', 'transformers', 'pandas'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def test_sending_a_run_loads_no_tensor_library(workspace: Path) -> None:
    Outbox(workspace / "runs" / "0001-tiny-aaaaaa" / "ledger").append(
        to_json(OpenRun(time=1, run_id="0001-tiny-aaaaaa", experiment="tiny", name="tiny", recipe={}))
    )
    probe = (
        "import sys; from pathlib import Path; from tasks.ledger import Ledger; "
        f"assert Ledger(None, Path({str(workspace)!r}), 'tiny').flush(); "
        "assert 'mlflow' in sys.modules; print({'torch', 'transformers'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (said.stdout.strip(), said.stderr) == ("set()", "")
    assert set(runs_of(client_of(workspace), "0001-tiny-aaaaaa")) == {""}


def test_a_run_is_recorded_with_params_curves_verdicts_and_lineage(workspace: Path) -> None:
    record_run(workspace, "0001-tiny-aaaaaa")
    client = client_of(workspace)
    runs = runs_of(client, "0001-tiny-aaaaaa")

    # 1. One run above, one a stage below
    parent = runs.pop("")
    assert parent.info.run_name == "0001-tiny-aaaaaa"
    assert parent.data.params == {
        "recipe": "tiny",
        "seed": "17",
        "stages.sft.kind": "sft",
        "stages.sft.epochs": "2.0",
    }
    assert set(runs) == set(STAGES)
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert {run.info.status for run in [parent, *runs.values()]} == {"FINISHED"}

    # 2. What the stage measured, and what its gate said
    sft = runs["sft"]
    assert sft.data.params == {"epochs": "2.0"}
    assert curve(client, sft, "loss") == JOURNAL_CURVE
    assert sft.data.metrics["test_nll"] == 0.4
    assert "undefined" not in sft.data.metrics
    assert sft.data.tags["vantage.verdict"] == "passed"
    assert sft.data.tags["vantage.gate.test_nll"] == "test_nll 0.400 <= 1: passed"
    assert json.loads(sft.data.tags["vantage.gate.test_nll.evidence"]) == {"test_nll": 0.4}
    assert sft.data.tags["vantage.provenance.device"] == "cpu"

    # 3. What it was made of: by our digests, MLflow's runs, its datasets, and its models
    tags = sft.data.tags
    assert (tags["vantage.digest"], tags["vantage.stage_key"]) == (sha("sft"), sha("key of sft"))
    assert tags["vantage.parent.init"] == sha("model")
    assert tags["vantage.parent.init.run"] == runs["model"].info.run_id
    assert tags["vantage.parent.data.run"] == runs["data.demos"].info.run_id
    (dataset,) = sft.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("demos", sha("data")[:36])
    assert {tag.key: tag.value for tag in dataset.tags} == {
        "mlflow.data.context": "training",
        "vantage.role": "data",
        "vantage.digest": sha("data"),
    }
    assert [given.model_id for given in sft.inputs.model_inputs] == [runs["model"].data.tags["vantage.model"]]
    assert [made.model_id for made in sft.outputs.model_outputs] == [tags["vantage.model"]]
    model = client.get_logged_model(tags["vantage.model"])
    assert (model.source_run_id, model.model_type, model.status) == (sft.info.run_id, "policy", "READY")
    assert model.tags["vantage.parent.init"] == sha("model")
    assert [(metric.key, metric.value) for metric in model.metrics] == [("test_nll", 0.4)]
    assert "vantage.model" not in runs["evaluation"].data.tags


def test_a_person_finds_the_parents_on_the_pages(workspace: Path) -> None:
    record_run(workspace, "0001-tiny-aaaaaa")
    client = client_of(workspace)
    runs = runs_of(client, "0001-tiny-aaaaaa")

    def page(stage: str) -> str:
        return f"#/experiments/{runs[stage].info.experiment_id}/runs/{runs[stage].info.run_id}"

    parents = f"**Parents:** init: [model]({page('model')}) · data: [data.demos]({page('data.demos')})"
    note = runs["sft"].data.tags["mlflow.note.content"]
    assert note.splitlines()[1].rstrip() == parents
    assert f"`{sha('sft')}`" in note
    model = client.get_logged_model(runs["sft"].data.tags["vantage.model"])
    assert parents in model.tags["mlflow.note.content"]
    table = runs[""].data.tags["mlflow.note.content"]
    assert f"| [sft]({page('sft')}) | completed |" in table
    assert f"candidate: [sft]({page('sft')})" in table


def test_a_reused_stage_links_its_producer_and_has_no_metrics(workspace: Path) -> None:
    record_run(workspace, "0001-tiny-aaaaaa")

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        for stage in STAGES:
            tell_reuse(ledger, stage)
        ledger.record_verdicts("sft", [VERDICT.model_copy(update={"passed": False, "threshold": 0.1})])
        ledger.finish_run("gate_closed")

    record_run(workspace, "0002-tiny-bbbbbb", tell)
    client = client_of(workspace)
    made, reused = runs_of(client, "0001-tiny-aaaaaa"), runs_of(client, "0002-tiny-bbbbbb")
    assert set(reused) == {"", *STAGES}
    assert (reused[""].info.status, reused["sft"].info.status) == ("FAILED", "FINISHED")
    for stage in STAGES:
        assert reused[stage].data.tags["vantage.reused_from"] == made[stage].info.run_id
        assert reused[stage].data.metrics == {}
        assert reused[stage].outputs.model_outputs == []
    assert reused["sft"].data.tags["vantage.parent.init.run"] == made["model"].info.run_id
    assert reused["sft"].data.tags["vantage.verdict"] == "closed"
    assert "made by [sft of run 0001-tiny-aaaaaa]" in reused["sft"].data.tags["mlflow.note.content"]
    assert len(client.search_logged_models([reused[""].info.experiment_id])) == 2


def test_an_artifact_that_no_run_of_the_server_made_is_recorded_where_it_is_reused(workspace: Path) -> None:
    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_reuse(ledger, "model")
        tell_stage(ledger, "sft")

    record_run(workspace, "0005-tiny-eeeeee", tell)
    runs = runs_of(client_of(workspace), "0005-tiny-eeeeee")
    assert "vantage.reused_from" not in runs["model"].data.tags
    assert runs["model"].data.tags["vantage.status"] == "reused"
    assert runs["sft"].data.tags["vantage.parent.init.run"] == runs["model"].info.run_id


def test_a_run_that_is_taken_over_goes_on_in_the_same_entries(workspace: Path) -> None:
    """An attempt dies while sft runs, another after sft was committed; neither told its end."""
    run_id = "0001-tiny-aaaaaa"
    client = client_of(workspace)

    def die_in_sft(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        kind, inputs, made = STAGES["sft"]
        ledger.open_stage(
            "sft", kind=kind, stage_key=made.stage_key, attempt=1, params={"epochs": 2.0}, inputs=inputs
        )
        ledger.send_metrics("sft", JOURNAL[:3])

    def wait_before_sft(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)

    def go_on(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_reuse(ledger, "model")
        tell_stage(ledger, "sft", attempt=2)

    record_run(workspace, run_id, die_in_sft)
    first = runs_of(client, run_id)
    assert (first[""].info.status, first["sft"].info.status) == ("RUNNING", "RUNNING")

    record_run(workspace, run_id, wait_before_sft)
    taken = runs_of(client, run_id)
    assert (taken[""].info.status, taken["sft"].info.status) == ("RUNNING", "KILLED")

    record_run(workspace, run_id, go_on)
    last = runs_of(client, run_id)
    assert {stage: run.info.run_id for stage, run in last.items()} == {
        stage: run.info.run_id for stage, run in first.items()
    }
    assert last["sft"].info.status == "FINISHED"
    assert last["sft"].data.tags["vantage.attempt"] == "2"
    assert curve(client, last["sft"], "loss") == JOURNAL_CURVE
    assert last["model"].data.tags["vantage.status"] == "completed"
    assert "vantage.reused_from" not in last["model"].data.tags


def test_what_another_dead_run_left_running_can_be_closed(workspace: Path) -> None:
    def leave(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})

    def close(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        ledger.close_stale("0001-tiny-aaaaaa", reason="its machine was lost")

    record_run(workspace, "0001-tiny-aaaaaa", leave)
    record_run(workspace, "0002-tiny-bbbbbb", close)
    runs = runs_of(client_of(workspace), "0001-tiny-aaaaaa")
    assert {stage: run.info.status for stage, run in runs.items()} == {
        "": "KILLED",
        "model": "FINISHED",
        "sft": "KILLED",
    }
    assert runs["sft"].data.tags["vantage.interrupted"] == "its machine was lost"


def test_metrics_that_are_not_finite_and_thousands_of_them_arrive(workspace: Path) -> None:
    entries = [
        Entry(step=step, time=float(step), metrics={"loss": float("nan") if step == 7 else 0.5, "kl": 0.1})
        for step in range(1200)
    ]

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})
        ledger.send_metrics("sft", entries)

    record_run(workspace, "0001-tiny-aaaaaa", tell)
    client = client_of(workspace)
    points = curve(client, runs_of(client, "0001-tiny-aaaaaa")["sft"], "loss")
    assert [step for step, _, _ in points] == list(range(1200))
    assert [step for step, _, value in points if value != value] == [7]


def test_more_params_than_mlflow_takes_at_once_and_a_value_longer_than_it_takes(workspace: Path) -> None:
    long = "ü" * 7000
    recipe: dict[str, Any] = {"recipe": "tiny", "stages": {f"s{i}": i for i in range(250)}, "template": long}

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", recipe)

    record_run(workspace, "0001-tiny-aaaaaa", tell)
    params = runs_of(client_of(workspace), "0001-tiny-aaaaaa")[""].data.params
    assert len(params) == 252
    assert params["stages.s249"] == "249"
    assert len(params["template"]) == 6000
    assert params["template"].endswith(f"ü… sha256 {sha(long)}")


def test_a_record_that_mlflow_refuses_is_set_aside_and_the_rest_goes_on(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0001-tiny-aaaaaa", "tiny", RECIPE)
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})
        ledger.send_metrics("sft", [Entry(step=0, time=1.0, metrics={"what?!*": 1.0})])
        ledger.finish_stage("sft", "failed", reason="out of memory")
        assert ledger.flush()
    (error,) = refused(workspace)
    assert "what?!*" in error
    assert "MLflow refused log_metrics" in caplog.text
    runs = runs_of(client_of(workspace), "0001-tiny-aaaaaa")
    assert runs["sft"].info.status == "FAILED"
    assert "out of memory" in runs["sft"].data.tags["mlflow.note.content"]


def test_a_run_deleted_by_hand_does_not_hold_up_what_comes_after(workspace: Path) -> None:
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0001-tiny-aaaaaa", "tiny", RECIPE)
        ledger.open_stage("sft", kind="sft", stage_key=sha("k"), attempt=1, params={}, inputs={})
        assert ledger.flush()
        deleted = ledger.mlflow_run_id("sft")
        assert deleted is not None
        client_of(workspace).delete_run(deleted)
        ledger.send_metrics("sft", JOURNAL)
        ledger.finish_run("completed")
        assert ledger.flush()
    runs = runs_of(client_of(workspace), "0001-tiny-aaaaaa")
    assert (runs[""].info.status, curve(client_of(workspace), runs["sft"], "loss")) == (
        "FINISHED",
        JOURNAL_CURVE,
    )


def test_an_outbox_that_cannot_be_read_is_begun_anew(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = workspace / "runs" / "0001-tiny-aaaaaa" / "ledger"
    Outbox(folder).append({"operation": "of a version to come"})
    record_run(workspace, "0001-tiny-aaaaaa")
    assert (folder.parent / "ledger-unreadable-1" / "outbox.jsonl").exists()
    assert "cannot be read and is begun anew" in caplog.text
    assert set(runs_of(client_of(workspace), "0001-tiny-aaaaaa")) == {"", *STAGES}


# Services that fail


def snapshot(client: MlflowClient, run_id: str) -> Any:
    """Everything of a run in MLflow, with MLflow's own ids replaced by ours."""
    runs = runs_of(client, run_id)
    experiment_id = runs[""].info.experiment_id
    models = client.search_logged_models([experiment_id])
    ours = {run.info.run_id: f"run of {stage}" for stage, run in runs.items()}
    ours |= {model.model_id: f"model of {model.tags['vantage.stage']}" for model in models}
    assert len(set(ours.values())) == len(ours), "one entry each"

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
            "datasets": [given.dataset.digest for given in run.inputs.dataset_inputs],
            "models": sorted(ours[given.model_id] for given in run.inputs.model_inputs),
            "made": sorted(ours[made.model_id] for made in run.outputs.model_outputs),
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


class Lost(ConnectionError):
    """The server did what it was asked, and the answer never arrived."""


class Cutting:
    """A client whose answer to the n-th call that writes is lost after the call was served."""

    def __init__(self, client: MlflowClient, *, cut_at: int) -> None:
        self._client = client
        self._cut_at = cut_at
        self.written: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name.startswith(("get_", "search_")):
            return method

        def call(*positional: Any, **named: Any) -> Any:
            self.written.append(name)
            answer = method(*positional, **named)
            if len(self.written) == self._cut_at:
                raise Lost(name)
            return answer

        return call


def test_a_kill_after_anything_was_written_leaves_one_entry_of_each(workspace: Path) -> None:
    """For every call that writes: the process ends right after it was served, and another sends the outbox."""
    run_id = "0001-tiny-aaaaaa"
    with Ledger("http://127.0.0.1:9", workspace, "tiny") as ledger:  # nobody listens there
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        tell_stage(ledger, "sft")
        ledger.finish_run("completed")
        assert not ledger.flush()
    folder = workspace / "runs" / run_id / "ledger"

    def send(server: Server, copy: Path, cut_at: int) -> list[str]:
        client = server.client
        cutting = Cutting(client, cut_at=cut_at)
        server.client = cutting  # type: ignore[assignment]
        with suppress(Lost):
            Sending(server, Outbox(copy / "ledger")).send()
        server.client = client
        return cutting.written

    def server_of(copy: Path) -> Server:
        return Server(f"sqlite:///{copy / 'mlflow.db'}", artifacts=copy / "mlartifacts")

    def fresh(name: str) -> Path:
        copy = workspace / name
        copy.mkdir()
        shutil.copy(workspace / "mlflow.db", copy)
        shutil.copytree(folder, copy / "ledger")
        return copy

    whole = fresh("whole")
    server = server_of(whole)
    written = send(server, whole, cut_at=0)
    assert {"create_run", "create_logged_model", "log_inputs", "log_outputs", "log_batch"} <= set(written)
    expected = snapshot(server.client, run_id)
    assert set(expected) == {"", "model", "sft", "model of model", "model of sft"}
    assert expected["sft"]["curves"]["loss"] == JOURNAL_CURVE

    for cut_at, name in enumerate(written, start=1):
        copy = fresh(f"cut-at-{cut_at}")
        server = server_of(copy)
        assert send(server, copy, cut_at)[-1] == name
        send(server, copy, cut_at=0)
        assert snapshot(server.client, run_id) == expected, f"cut after call {cut_at}, {name}"
        shutil.rmtree(copy)


def test_what_one_run_could_not_send_the_next_one_sends_before_its_own(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger("http://someone:s3cret@127.0.0.1:9", workspace, "tiny") as ledger:
        tell_run(ledger, "0001-tiny-aaaaaa")
        assert not ledger.flush()
        assert ledger.mlflow_run_id() is None
        assert ledger.where() == "http://127.0.0.1:9/"
    assert caplog.text.count("MLflow (http://127.0.0.1:9) cannot be reached; the run goes on") == 1
    assert "s3cret" not in caplog.text
    assert not any(
        b"s3cret" in path.read_bytes() for path in (workspace / "runs").rglob("*") if path.is_file()
    )

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_reuse(ledger, "sft")

    record_run(workspace, "0002-tiny-bbbbbb", tell)
    client = client_of(workspace)
    made = runs_of(client, "0001-tiny-aaaaaa")
    assert curve(client, made["sft"], "loss") == JOURNAL_CURVE
    reused = runs_of(client, "0002-tiny-bbbbbb")["sft"]
    assert reused.data.tags["vantage.reused_from"] == made["sft"].info.run_id


def test_a_database_that_was_lost_is_written_again(workspace: Path, database: Path) -> None:
    record_run(workspace, "0001-tiny-aaaaaa")
    expected = snapshot(client_of(workspace), "0001-tiny-aaaaaa")
    (workspace / "mlflow.db").unlink()
    shutil.copy(database, workspace / "mlflow.db")
    assert Ledger(None, workspace, "tiny").flush()
    assert snapshot(client_of(workspace), "0001-tiny-aaaaaa") == expected


def test_an_outbox_that_cannot_be_written_costs_a_warning_and_no_run(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (workspace / "runs").write_text("not a folder")
    with Ledger(None, workspace, "tiny") as ledger:
        tell_run(ledger, "0001-tiny-aaaaaa")
    assert "the ledger's outbox" in caplog.text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://me:secret@host:5000/x", "http://host:5000/x"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
    ],
)
def test_an_address_is_shown_without_its_password(uri: str, shown: str) -> None:
    assert without_password(uri) == shown


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    """A real server on loopback, ended with everything that it started."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **MLFLOW_ENVIRONMENT},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        give_up = time.monotonic() + 90
        while not answers(port):
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < give_up, (folder / "server.log").read_text()
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def losing_proxy(port: int, to_port: int) -> Iterator[list[str]]:
    """Passes requests on, and loses the first two answers of every kind of write; yields the paths that it lost."""
    lost: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server = HTTPConnection("127.0.0.1", to_port, timeout=30)
            server.request(self.command, self.path, body, dict(self.headers.items()))
            answer = server.getresponse()
            content = answer.read()
            server.close()
            kind = self.path.partition("/artifacts/")[0]  # one kind for all files that are uploaded
            if self.command != "GET" and "search" not in kind and lost.count(kind) < 2:
                lost.append(kind)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = pass_on

        def log_message(self, format: str, *arguments: Any) -> None:
            """Silent."""

    proxy = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        proxy.shutdown()
        proxy.server_close()


def test_a_server_that_is_down_comes_goes_and_loses_answers_ends_up_with_everything_once(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    port, proxy_port = free_port(), free_port()
    run_id = "0001-tiny-aaaaaa"
    with Ledger(f"http://127.0.0.1:{proxy_port}", workspace, "tiny") as ledger:
        # 1. Down at the start: told, not sent, nothing raised
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        assert not ledger.flush()

        with mlflow_server(workspace, port):
            # 2. There, behind a wire that loses answers
            with losing_proxy(proxy_port, port) as lost:
                for _ in range(100):
                    if ledger.flush():
                        break
                assert ledger.flush()
                assert any(path.endswith("runs/create") for path in lost)
            page = ledger.where("model")

        # 3. Away while the next stage trains
        tell_stage(ledger, "sft")
        assert not ledger.flush()

        # 4. Back again: what waited, and a publication
        model = workspace / "model"
        model.mkdir()
        (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (model / "tokenizer_config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
        with mlflow_server(workspace, port), losing_proxy(proxy_port, port) as lost:
            ledger.publish("sft", SFT, model, "quickstart", alias="champion")
            ledger.finish_run("completed")
            for _ in range(100):
                if ledger.flush():
                    break
            assert ledger.flush()
            assert any(path.endswith("model-versions/create") for path in lost)
    assert refused(workspace) == []

    found = snapshot(client_of(workspace), run_id)
    assert set(found) == {"", "model", "sft", "model of model", "model of sft"}
    assert found["sft"]["curves"]["loss"] == JOURNAL_CURVE
    assert [value for _, _, value in found["sft"]["curves"]["test_nll"]] == [0.4]
    assert {found[stage]["status"] for stage in ("", "model", "sft")} == {"FINISHED"}
    assert found["sft"]["models"] == ["model of model"]
    (version,) = client_of(workspace).search_model_versions("name = 'quickstart'")
    assert version.tags["vantage.digest"] == SFT.digest
    champion = client_of(workspace).get_model_version_by_alias("quickstart", "champion")
    assert champion.version == version.version
    (weights,) = (workspace / "artifacts").rglob("model.safetensors")
    assert weights.read_bytes() == b"weights"
    model_run = runs_of(client_of(workspace), run_id)["model"]
    assert page == (
        f"http://127.0.0.1:{proxy_port}/#/experiments/{model_run.info.experiment_id}"
        f"/runs/{model_run.info.run_id}?workflowType=machine_learning"
    )
