"""An artifact that is reused leads back to the run that made it."""

from pathlib import Path

import pytest

from tests.ledger.small_run import (
    EVALUATION,
    RECIPE,
    SFT,
    STAGES,
    VERDICT,
    client_of,
    record_run,
    runs_of,
    sha,
    tell_reuse,
    tell_stage,
)
from vantage.ledger.operations import Input
from vantage.ledger.run_ledger import Ledger


@pytest.mark.slow
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
    assert reused[""].data.metrics == made[""].data.metrics, "runs are compared by what they reuse too"
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


def test_a_parent_is_the_stage_that_is_read_also_where_another_came_out_the_same(workspace: Path) -> None:
    """A policy that learned nothing has an artifact with the same digest as SFT's, under a stage key of its own."""
    same = SFT.model_copy(update={"files_digest": sha("weights")})
    policy = same.model_copy(update={"stage_key": sha("key of policy"), "parents": {"init": same.digest}})
    policy_inputs = {"init": Input(stage="sft", artifact=same)}
    both = {
        "baseline": Input(stage="sft", artifact=same),
        "candidate": Input(stage="policy", artifact=policy),
    }

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        for stage, kind, inputs, made in (
            ("sft", "sft", {}, same),
            ("policy", "policy_optimization", policy_inputs, policy),
            ("evaluation", "evaluation", both, EVALUATION),
        ):
            ledger.open_stage(stage, kind=kind, stage_key=made.stage_key, attempt=1, params={}, inputs=inputs)
            ledger.finish_stage(stage, "completed", artifact=made)
        ledger.finish_run("completed")

    record_run(workspace, "0006-tiny-ffffff", tell)
    client = client_of(workspace)
    runs = runs_of(client, "0006-tiny-ffffff")
    ids = {stage: run.info.run_id for stage, run in runs.items()}
    assert runs["policy"].data.tags["vantage.parent.init.run"] == ids["sft"]
    assert runs["evaluation"].data.tags["vantage.parent.baseline.run"] == ids["sft"]
    assert runs["evaluation"].data.tags["vantage.parent.candidate.run"] == ids["policy"]
    models = {
        stage: run.data.tags["vantage.model"] for stage, run in runs.items() if stage in ("sft", "policy")
    }
    assert [given.model_id for given in runs["policy"].inputs.model_inputs] == [models["sft"]]
    assert {given.model_id for given in runs["evaluation"].inputs.model_inputs} == set(models.values())
    note = runs["policy"].data.tags["mlflow.note.content"]
    assert f"init: [sft](#/experiments/{runs[''].info.experiment_id}/runs/{ids['sft']})" in note
    assert "learned nothing: the best weights are those of sft" in note
    assert "a model is compared with itself" in runs["evaluation"].data.tags["mlflow.note.content"]
    assert runs["policy"].data.tags["vantage.remark"] == "learned nothing: the best weights are those of sft"
    assert "vantage.remark" not in runs["sft"].data.tags
    assert "learned nothing" in runs[""].data.tags["mlflow.note.content"]
    assert "learned nothing" in client.get_logged_model(models["policy"]).tags["mlflow.note.content"]
