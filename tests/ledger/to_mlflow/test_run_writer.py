"""An auditor and a person find in MLflow what the ledger recorded of a run."""

import json
from pathlib import Path

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from tests.ledger.small_run import (
    JOURNAL_CURVE,
    ORIGIN,
    RECIPE,
    SOURCES,
    STAGES,
    USAGE,
    client_of,
    curve,
    record_run,
    runs_of,
    sha,
    snapshot,
    tell_reuse,
    tell_stage,
)
from vantage.ledger.run_ledger import Ledger


def test_a_run_is_recorded_with_params_curves_verdicts_and_lineage(workspace: Path) -> None:
    record_run(workspace, "0001-tiny-aaaaaa")
    client = client_of(workspace)
    runs = runs_of(client, "0001-tiny-aaaaaa")

    # 1. One parent run, with one child for each stage
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

    # 2. The stage's metrics, and the verdict of its gate
    sft = runs["sft"]
    assert sft.data.params == {"epochs": "2.0"}
    assert curve(client, sft, "loss") == JOURNAL_CURVE
    assert sft.data.metrics["test_nll"] == 0.4
    assert "undefined" not in sft.data.metrics
    assert sft.data.tags["vantage.verdict"] == "passed"
    assert sft.data.tags["vantage.gate.test_nll"] == "test_nll 0.400 <= 1: passed"
    assert json.loads(sft.data.tags["vantage.gate.test_nll.evidence"]) == {"test_nll": 0.4}
    assert sft.data.tags["vantage.provenance.device"] == "cpu"
    assert sft.data.tags["vantage.energy.gpu_joules"] == "1234.6"
    told = {(name, tag) for name, run in runs.items() for tag in run.data.tags if "energy" in tag}
    assert told == {("sft", "vantage.energy.gpu_joules")}, "nothing is told where nothing was measured"

    # What the machine did, where MLflow's page shows "System metrics"
    assert sft.data.metrics["system/cpu_utilization_percentage"] == 87.5
    told = {
        name for name, run in runs.items() if any(each.startswith("system/") for each in run.data.metrics)
    }
    assert told == {"sft"}

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
        "vantage.source.sha256": SOURCES["data.demos"],
    }
    assert json.loads(dataset.dataset.source)["source_sha256"] == SOURCES["data.demos"]
    assert runs["data.demos"].data.tags["vantage.source.sha256"] == SOURCES["data.demos"]
    assert "vantage.source.sha256" not in tags
    assert [given.model_id for given in sft.inputs.model_inputs] == [runs["model"].data.tags["vantage.model"]]
    assert [made.model_id for made in sft.outputs.model_outputs] == [tags["vantage.model"]]
    model = client.get_logged_model(tags["vantage.model"])
    assert (model.source_run_id, model.model_type, model.status) == (sft.info.run_id, "policy", "READY")
    assert model.tags["vantage.parent.init"] == sha("model")
    measured = {metric.key: metric.value for metric in model.metrics}
    assert measured == {"test_nll": 0.4, "accuracy": 0.5}, "its own, and what its evaluation measured"
    assert "vantage.model" not in runs["evaluation"].data.tags

    # 4. Who ran it, from which revision, and what runs are compared by
    for run in (parent, sft):
        assert ORIGIN.items() <= run.data.tags.items()
        assert run.info.user_id == "ada"
    assert parent.data.metrics == {"sft.test_nll": 0.4, "evaluation.accuracy": 0.5}


@pytest.mark.slow
def test_an_evaluations_samples_are_a_table_that_mlflow_shows(workspace: Path) -> None:
    record_run(workspace, "0001-tiny-aaaaaa")
    client = client_of(workspace)
    evaluation = runs_of(client, "0001-tiny-aaaaaa")["evaluation"]
    tables = json.loads(evaluation.data.tags["mlflow.loggedArtifacts"])
    assert tables == [{"path": "samples.json", "type": "table"}]
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(
        f"sqlite:///{workspace / 'mlflow.db'}"
    )  # load_table asks there, not its own client
    try:
        rows = client.load_table(evaluation.info.experiment_id, "samples.json", [evaluation.info.run_id])
    finally:
        mlflow.set_tracking_uri(before)
    assert list(rows.columns) == [
        "prompt",
        "baseline",
        "baseline_judgement",
        "candidate",
        "candidate_judgement",
    ]
    assert rows.values.tolist() == [["1+1?", "2|3", 0.0, "#2\u4e2d", 1.0]] * 2
    page = Path(client.download_artifacts(evaluation.info.run_id, "samples.html")).read_text(encoding="utf-8")
    assert "candidate · judgement 1" in page and "<pre>#2\u4e2d</pre>" in page


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


@pytest.mark.slow
def test_a_stage_that_its_own_run_finished_and_finds_again_stays_as_it_was(workspace: Path) -> None:
    """The stage gets no number twice at another time, no other outcome and no later end."""
    run_id = "0001-tiny-aaaaaa"

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        for stage in STAGES:
            tell_stage(ledger, stage)
        # a stage that is killed before its scratch folder was removed is recorded once more
        tell_stage(ledger, "sft")
        ledger.finish_run("resumable")

    def find_again(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        for stage in STAGES:
            tell_reuse(ledger, stage)
        ledger.finish_run("completed")

    record_run(workspace, run_id, tell)
    client = client_of(workspace)
    before = snapshot(client, run_id)
    assert [value for _, _, value in before["sft"]["curves"]["test_nll"]] == [0.4]
    assert [value for _, _, value in before["evaluation"]["curves"]["accuracy"]] == [0.5]
    record_run(workspace, run_id, find_again)
    after = snapshot(client, run_id)
    times = before["sft"].pop("times"), after["sft"].pop("times")
    assert times[0][0] == times[1][0]
    assert {name: after[name] for name in STAGES} == {name: before[name] for name in STAGES}


def test_a_run_under_way_shows_its_models_and_what_is_tried_again(workspace: Path) -> None:
    """MLflow shows them while the run goes on, not only at its end."""
    run_id = "0001-tiny-aaaaaa"

    def status() -> str:
        return str(runs_of(client_of(workspace), run_id)["sft"].info.status)

    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        sft = {"kind": "sft", "stage_key": sha("k"), "params": {}, "inputs": {}}
        ledger.open_stage("sft", attempt=1, **sft)
        assert ledger.flush()
        assert status() == "RUNNING"
        ledger.finish_stage("sft", "failed", reason="out of memory")
        assert ledger.flush()
        assert status() == "FAILED"
        ledger.open_stage("sft", attempt=2, **sft)
        assert ledger.flush()
        assert status() == "RUNNING"
        _, _, tags = snapshot(client_of(workspace), run_id)["model of model"]
        assert "**Parents:**" in tags["mlflow.note.content"]
        ledger.finish_run("resumable")


def test_readings_of_a_second_attempt_follow_those_of_the_first(workspace: Path) -> None:
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0001-tiny-cccccc", "tiny", {})
        for attempt in (1, 2):
            ledger.open_stage("sft", kind="sft", stage_key=sha("key"), attempt=attempt, params={}, inputs={})
            ledger.finish_stage("sft", "resumable", reason="killed", usage=USAGE)
        assert ledger.flush(60)
        run_id = ledger.mlflow_run_id("sft")
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    history = client.get_metric_history(str(run_id), "system/cpu_utilization_percentage")
    assert sorted(point.step for point in history) == [1, 3], "the first reading of each attempt has no value"
