"""The page about a critic is in MLflow, is the same however often it is sent, and stops nothing where it cannot be made."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.ledger.cutting import cut_after_every_write
from tests.ledger.small_run import artifact, client_of, refused, runs_of
from tests.schemas.critic_samples import diagnosis
from vantage.ledger.critic_page import diagnosis_plots
from vantage.ledger.journal import Entry
from vantage.ledger.operations import Input
from vantage.ledger.run_ledger import Ledger
from vantage.schemas.records.artifacts import Artifact, PolicyCheckpoint, ValueModel

RUN_ID = "0001-tiny-aaaaaa"
VALUE = artifact(ValueModel, "value", {}, metrics={"explained_variance": 0.6})
POLICY_INPUTS = {"critic": Input(stage="value", artifact=VALUE)}
POLICY = artifact(PolicyCheckpoint, "policy", POLICY_INPUTS, metrics={"test_score": 1.0})
COURSE = [
    Entry(step=step, time=1.7e9 + step, metrics={"explained_variance": 0.9 - 0.1 * step, "value_bias": 0.1})
    for step in range(1, 9)
]


STAGES: dict[str, tuple[str, Artifact, dict[str, Input]]] = {
    "value": ("value_pretraining", VALUE, {}),
    "policy": ("policy_optimization", POLICY, POLICY_INPUTS),
}


def tell(ledger: Ledger, folder: Path, course: list[Entry], *, stages: Sequence[str] = tuple(STAGES)) -> None:
    ledger.open_run(RUN_ID, "tiny", {})
    for stage in stages:
        kind, made, inputs = STAGES[stage]
        ledger.open_stage(
            stage, kind=kind, stage_key=made.stage_key, attempt=1, params={"iterations": 8}, inputs=inputs
        )
        ledger.send_metrics(stage, course if stage == "policy" else [])
        ledger.finish_stage(stage, "completed", artifact=made, folder=folder)


def stored(workspace: Path, file: bytes | None) -> Path:
    """Return the folder of an artifact with such a diagnosis."""
    folder = workspace / "object"
    folder.mkdir()
    if file is not None:
        (folder / "diagnosis.json").write_bytes(file)
    return folder


def record(workspace: Path, *, file: bytes | None, course: list[Entry]) -> dict[str, Any]:
    folder = stored(workspace, file)
    with Ledger(None, workspace, "tiny") as ledger:
        tell(ledger, folder, course)
        assert ledger.flush()
    assert refused(workspace) == []
    return found(client_of(workspace))


def found(client: MlflowClient) -> dict[str, Any]:
    """Return stage → names of its files, the text of its page, and its tag."""
    runs = runs_of(client, RUN_ID)
    told = {}
    for stage in STAGES.keys() & runs.keys():
        run = runs[stage]
        files = [file.path for file in client.list_artifacts(run.info.run_id)]
        page = Path(run.info.artifact_uri.removeprefix("file://"), "critic.html")
        text = page.read_text() if page.is_file() else None
        told[stage] = (files, text, run.data.tags.get("vantage.critic"))
    return told


def test_a_pretrained_critic_and_its_course_have_their_pages(workspace: Path) -> None:
    told = record(workspace, file=diagnosis().model_dump_json().encode(), course=COURSE)
    files, page, tag = told["value"]
    assert files == ["critic.html"]
    assert page is not None and page.count("<svg") == 7
    assert tag.startswith("Use it: it explains 0.60") and tag.split(",")[0] in page
    files, page, tag = told["policy"]
    assert files == ["critic.html"]
    assert page is not None and page.count("<svg") == 3
    assert tag.startswith("Explained variance falls from 0.75 to 0.15")


@pytest.mark.slow
def test_sent_again_after_a_cut_anywhere_it_is_the_same(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has no plots here, which take most of the time. ``test_all_sent_twice_is_the_same`` draws them."""
    monkeypatch.setattr(diagnosis_plots, "svg", lambda draw, *, label: f"<svg>{label}</svg>")
    folder = stored(workspace, diagnosis().model_dump_json().encode())
    with Ledger("http://127.0.0.1:9", workspace, "tiny") as ledger:  # nobody listens there
        tell(ledger, folder, [], stages=["value"])
        assert not ledger.flush()
    _, written = cut_after_every_write(workspace, RUN_ID, found, since="log_text")
    assert written.count("log_text") == 1


@pytest.mark.slow
def test_all_sent_twice_is_the_same(workspace: Path) -> None:
    before = record(workspace, file=diagnosis().model_dump_json().encode(), course=COURSE)
    (workspace / "runs" / RUN_ID / "ledger" / "sent.json").unlink()
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        assert ledger.flush()
    assert found(client_of(workspace)) == before


def test_without_a_diagnosis_and_a_critic_there_is_no_page(workspace: Path) -> None:
    without = [Entry(step=1, time=1.7e9, metrics={"policy_loss": 0.1})]
    assert record(workspace, file=None, course=without) == dict.fromkeys(
        ("value", "policy"), ([], None, None)
    )


def test_a_diagnosis_of_another_version_stops_nothing(workspace: Path) -> None:
    told = record(workspace, file=b'{"version": 2}', course=COURSE)
    assert told["value"] == ([], None, None)
    assert told["policy"][0] == ["critic.html"]
