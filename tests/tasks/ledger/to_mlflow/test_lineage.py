"""Who made what: an artifact that is reused leads back to the run that made it."""

from pathlib import Path

from small_run import RECIPE, STAGES, VERDICT, client_of, record_run, runs_of, tell_reuse, tell_stage

from tasks.ledger.run_ledger import Ledger


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
