"""An audit checks what a server of MLflow hands out itself, and a database that was lost and written again."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.ledger.test_sender import mlflow_server
from tests.review.audit.conftest import run_once, write_recipe
from tests.review.audit.tampering import Case, flip_bit, found
from tests.support.ports import own_port
from vantage.ledger.run_ledger import Ledger
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Case, Path]]:
    """Yield a run whose records and copies a server has, and the folder in which the server keeps the copies."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "server").mkdir()
    port = own_port()
    with mlflow_server(folder / "server", port, seconds=300), pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        workspace = Workspace(folder / "workspace")
        run_once(workspace, write_recipe(folder))
        [record] = read_runs(workspace)
        yield Case(workspace, record, folder), folder / "server" / "artifacts"


@pytest.mark.slow
def test_what_a_server_hands_out_is_fetched_and_hashed_and_no_more_than_was_published(
    served: tuple[Case, Path],
) -> None:
    case, artifacts = served
    location = case.record.copies["fake"].location
    assert location.startswith("mlflow-artifacts:")
    for target in (None, "fake@champion"):
        report = case.audit(target)
        assert (report.exit_code, found(report), found(report, "unchecked")) == (0, [], [])
    [model] = artifacts.rglob(f"{location.split('/models/')[1]}")
    weights = model / "model" / "model.safetensors"
    whole = weights.read_bytes()
    flip_bit(weights)
    assert any("copy fake/1: model: model.safetensors: sha256 is" in each for each in found(case.audit()))
    weights.write_bytes(whole)
    more = model / "model" / "more.bin"
    with more.open("wb") as file:
        file.truncate(100 << 20)
    assert any("were published; they were not fetched" in each for each in found(case.audit()))
    more.unlink()
    assert case.audit().exit_code == 0


def test_a_database_that_was_lost_and_written_again_agrees(case: Case, tmp_path: Path) -> None:
    """MLflow gives every model another id, and so another place; the run has recorded the first one."""
    database = case.workspace.root / "mlflow.db"
    database.unlink()
    assert Ledger(None, case.workspace.root, "fake").flush()
    client = MlflowClient(f"sqlite:///{database}")
    assert client.get_model_version("fake", "1").source != case.record.copies["fake"].location
    report = case.audit()
    assert (report.exit_code, found(report), found(report, "unchecked")) == (0, [], [])
    [note] = [each for each in found(report, "note") if "copy fake/1" in each]
    assert "in another database of MLflow" in note
    flip_bit(
        Path(client.get_model_version("fake", "1").source.removeprefix("file://")) / "model/model.safetensors"
    )
    assert case.audit().exit_code == 1
    shutil.rmtree(tmp_path / "copy" / "mlartifacts")
    assert case.audit().exit_code == 1
