"""Reports describe runs that are complete, end at a closed gate, are interrupted, reused, damaged, removed or old."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ledger.test_critic_page import Page
from tests.support.fixtures import RECIPE
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.review.reports.files import REPORT, page_of, write_report
from vantage.review.reports.gather import gather_report
from vantage.review.reports.gathered import Report, Step
from vantage.runs.record import RunRecord
from vantage.runs.run import read_run, read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.storage.store import Store

pytestmark = pytest.mark.usefixtures("unsent")

CLOSED = "stages.value.gate.at_least=0.5"


def run(workspace: Workspace, recipe: Path, *overrides: str, until: str | None = None) -> str:
    with orchestrated(workspace, recipe, *overrides, in_process=True) as orchestrator:
        attempt_all(orchestrator, until=until)
        if until is None:
            orchestrator.run.update(status=orchestrator.run.outcome())
            orchestrator.ledger.finish_run(orchestrator.run.outcome())
        orchestrator.ledger.close()
        return orchestrator.run.record.run_id


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, ledger_database: str) -> Path:
    """Return the folder of a workspace with three runs: one is complete, one reuses stages and ends at a closed gate,
    and one is interrupted.
    """
    folder = tmp_path_factory.mktemp("made")
    (folder / "fake.yaml").write_text(RECIPE)
    workspace = Workspace(folder / "workspace")
    workspace.root.mkdir()
    (workspace.root / "measured.json").write_text(
        json.dumps({"prepare_data": {"source_rows": 100.0, "dropped_rows": 5.0, "repeated_rows": 0.0}})
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", ledger_database)
        run(workspace, folder / "fake.yaml")
        run(workspace, folder / "fake.yaml", CLOSED)
        run(workspace, folder / "fake.yaml", "seed=18", until="value")
    return folder


@pytest.fixture
def found(made: Path, tmp_path: Path) -> Callable[[int], tuple[Workspace, RunRecord]]:
    """Return a copy of the workspace, and the run of a number in it."""
    shutil.copytree(made / "workspace", tmp_path / "copy")
    workspace = Workspace(tmp_path / "copy")

    def of(number: int) -> tuple[Workspace, RunRecord]:
        return workspace, next(each for each in read_runs(workspace) if each.number == number)

    return of


Found = Callable[[int], tuple[Workspace, RunRecord]]


def step(report: Report, name: str) -> Step:
    return next(each for each in report.steps if each.name == name)


def test_a_metric_has_the_interval_that_its_artifact_records(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval of 100 prompts with a standard error of 0.01 is 0.5 ± 0.01·t(0.975, 99), where t is 1.984217."""
    workspace, record = found(1)
    known = {
        record.stages["sft"].digest: {"validation_nll": Uncertainty(n=100, rows=100, standard_error=0.01)}
    }

    def sealed(_: Store, digest: str) -> SimpleNamespace:
        return SimpleNamespace(measured=SimpleNamespace(uncertainty=known.get(digest, {})))

    monkeypatch.setattr(Store, "sealed", sealed)
    measured = {
        each.step: each for each in gather_report(workspace, record).measured if each.metric != "train_rows"
    }
    assert measured["sft"].interval == pytest.approx((0.48015783, 0.51984217), abs=1e-7)
    assert (measured["sft"].metric, measured["sft"].value, measured["sft"].n) == ("validation_nll", 0.5, 100)
    assert (measured["value"].interval, measured["value"].n) == (None, None)


def test_a_complete_run(found: Found) -> None:
    """The report of a complete run has all of its parts."""
    report = gather_report(*found(1))
    assert report.status == "completed" and report.openings == 1
    assert [each.name for each in report.steps][-5:] == ["sft", "reward", "value", "policy", "evaluation"]
    assert dict(step(report, "policy").reads)["critic"] == "value"
    assert [(gate.step, gate.asks, gate.verdict and gate.verdict.passed) for gate in report.gates] == [
        ("reward", "pair_accuracy >= 0.75", True),
        ("value", "explained_variance >= 0.3", True),
        ("evaluation", "accuracy_gain >= 0", True),
    ]
    decision = report.decision
    assert decision is not None
    assert [(each.step, each.candidate, each.baseline) for each in decision.judged] == [
        ("evaluation", "policy", "sft")
    ]
    assert [each.digest for each in decision.models] == [step(report, "policy").digest]
    assert all(
        re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", each) for each in (decision.began, decision.ended)
    )
    assert decision.author != "unknown" and decision.alarms == ()
    assert decision.task == (
        "evaluation compares policy with sft on the test prompts of prompts (builtin:arithmetic/prompts); the verifier arithmetic judges the responses.",
    )
    policy = next(each for each in report.curves if each.step == "policy")
    assert {curve.metric: curve.points[-1] for curve in policy.curves} == {
        "explained_variance": (12, pytest.approx(0.6 - 0.05 * 11)),
        "value_bias": (12, 0.25),
        "loss": (12, pytest.approx(1 / 12)),
    }
    assert {cost.step: cost.attempts for cost in report.costs} == {each.name: 1 for each in report.steps}
    assert all(cost.gpus == 0 and cost.all_seconds > 0 for cost in report.costs)
    assert "python" in dict(report.environment) and len(report.code) == len(report.steps)
    [evaluation] = report.comparisons
    assert evaluation.samples == () and "holds no responses" in evaluation.missing[0]
    assert any("of the source's rows cannot be used" in each.text for each in report.remarks)


def test_a_closed_gate_with_reused_stages(found: Found) -> None:
    workspace, record = found(2)
    report = gather_report(workspace, record)
    assert report.status == "gate_closed"
    assert {each.name: each.status for each in report.steps if not each.is_implicit} == {
        "sft": "reused",
        "reward": "reused",
        "value": "gate_closed",
        "policy": "blocked",
        "evaluation": "blocked",
    }
    assert step(report, "sft").made_by == found(1)[1].run_id
    assert next(each for each in report.curves if each.step == "sft").made_by == found(1)[1].run_id
    assert report.costs == (), "what is reused cost nothing here"
    assert any("What can be done" in line for line in report.next_steps)
    page = page_of(workspace, record)
    assert "A gate is closed" in page and "closed: what depends on it did not run" in page
    assert page.index("The gate of value is closed") < page.index("What can be done") < page.index("Pipeline")
    assert "Nothing was measured" in page, "the gate of the evaluation"


def test_a_run_whose_process_died(found: Found) -> None:
    workspace, record = found(3)
    record = record.model_copy(
        update={
            "stages": {
                **record.stages,
                "value": record.stages["value"].model_copy(update={"status": "running"}),
            }
        }
    )
    report = gather_report(workspace, record)
    assert (report.status, step(report, "value").status) == ("resumable", "interrupted")
    assert "goes on where it stopped" in page_of(workspace, record)
    under_way = gather_report(workspace, record, is_active=True)
    assert (under_way.status, step(under_way, "value").status) == ("running", "running")


def test_the_same_run_has_the_same_page_which_is_whole(found: Found, tmp_path: Path) -> None:
    workspace, record = found(1)
    first = write_report(workspace, record.run_id)
    again = write_report(workspace, record.run_id, tmp_path / "new" / "again.html")
    assert first == workspace.folder(record.run_id) / REPORT and first.read_bytes() == again.read_bytes()
    page = Page(again.read_text())
    assert not {"script", "iframe", "link"} & {*page.tags}
    ids = set(re.findall(r' id="([^"]+)"', again.read_text()))
    assert all(each.startswith("#") and each[1:] in ids for each in page.references)


def test_energy_is_that_of_all_attempts_that_told_it(found: Found) -> None:
    """The stage sft has attempts of 1.5 and 2 J and a third whose process died. The other stages recorded no energy."""
    workspace, record = found(1)
    outbox = workspace.folder(record.run_id) / "ledger" / "outbox.jsonl"
    lines = [json.loads(line) for line in outbox.read_text().splitlines()]

    def of(operation: str) -> dict[str, object]:
        return next(each for each in lines if each["operation"] == operation and each["stage"] == "sft")

    begun, ended = of("open_stage"), of("finish_stage")
    assert "energy" not in ended, "where nothing is measured the outbox is that of before"
    more = [{**ended, "energy": {"cpu_joules": 1.5, "gpu_joules": None}}, {**begun, "attempt": 2}]
    more += [{**ended, "energy": {"cpu_joules": 2.0, "gpu_joules": 7.0}}, {**begun, "attempt": 3}]
    lines[lines.index(ended) : lines.index(ended) + 1] = more
    outbox.write_text("".join(json.dumps(each) + "\n" for each in lines))
    costs = {cost.step: cost for cost in gather_report(workspace, record).costs}
    assert costs["sft"].energy == Energy(cpu_joules=3.5, gpu_joules=7.0)
    assert (costs["sft"].attempts, costs["sft"].measured_attempts) == (3, 2)
    assert costs["policy"].energy is None
    assert "3.5 J (2 of 3 attempts)" in page_of(workspace, record)


def test_a_damaged_ledger_is_named_and_the_rest_is_there(found: Found) -> None:
    workspace, record = found(1)
    outbox = workspace.folder(record.run_id) / "ledger" / "outbox.jsonl"
    outbox.write_text('{"operation": "nonsense"}\n' + outbox.read_text())
    report = gather_report(workspace, record)
    assert len([line for line in report.missing if "cannot be read" in line]) == 1
    assert report.gates and report.measured and report.costs


def test_what_gc_has_removed_is_missed_and_nothing_else(found: Found) -> None:
    workspace, record = found(1)
    shutil.rmtree(workspace.folder(record.run_id) / "ledger")
    shutil.rmtree(workspace.store)
    report = gather_report(workspace, record.model_copy(update={"status": "removed"}))
    assert report.curves == () and len(report.gates) == 3
    assert any("policy has no curves" in line for line in report.missing)
    assert "not in the store any longer" in report.comparisons[0].missing[0]
    assert "removed this run" in page_of(workspace, record.model_copy(update={"status": "removed"}))


def test_a_record_of_an_earlier_version_has_fewer_fields(found: Found) -> None:
    workspace, record = found(1)
    written = json.loads((workspace.folder(record.run_id) / "run.json").read_text())
    for stage in written["stages"].values():
        for name in ("provenance", "key_parts", "warnings", "samples", "seconds", "remark", "left_out"):
            stage.pop(name)
    old = RunRecord.model_validate_json(json.dumps(written))
    page = page_of(workspace, old)
    assert "Learning curves" in page and "Environment" in page


def test_texts_of_users_are_text(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "canary-0123456789")
    workspace, record = found(2)
    nasty = '<script>alert(1)</script>"><img src=x> canary-0123456789 \x1b[2J' + "long " * 100_000
    stages = {
        name: stage.model_copy(update={"reason": nasty, "warnings": (nasty,), "remark": nasty})
        for name, stage in record.stages.items()
    }
    changed = record.model_copy(update={"stages": stages, "overrides": (nasty,), "source": nasty})
    page = page_of(workspace, changed)
    assert not {"script", "img"} & {*Page(page).tags}
    assert "canary" not in page and "\x1b" not in page
    assert len(page) < 1_000_000


def test_a_run_that_does_not_exist_is_refused(found: Found) -> None:
    workspace, _ = found(1)
    with pytest.raises(RunError, match="there is no run"):
        write_report(workspace, "0009-fake-aaaaaa")
    assert not workspace.folder("0009-fake-aaaaaa").exists()
    assert read_run(workspace, found(1)[1].run_id)
