"""The audit hashes what MLflow loads: found as MLflow finds it, wherever that lies."""

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from mlflow.models import Model
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository
from mlflow.tracking import MlflowClient

from tests.review.audit.tampering import Case, edit_json, flip_bit, found
from vantage.ledger.to_mlflow.published_models import find_published, problems_of_published
from vantage.schemas.records.audit import AuditReport

WEIGHTS = "model/model.safetensors"


def other_copy(case: Case, place: Path) -> Path:
    """Give MLflow's copy of the policy another place and other weights."""
    shutil.copytree(case.copy_of("fake"), place)
    flip_bit(place / WEIGHTS)
    return place


def mlflow_loads(case: Case, address: str) -> Path:
    """Return where MLflow's own client finds the files of an address; an oracle that none of our code computes."""
    with pytest.MonkeyPatch.context() as patched:
        # Another test of this process may have called `mlflow.set_tracking_uri`, which goes before the environment.
        patched.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{case.workspace.root / 'mlflow.db'}")
        found_at = ModelsArtifactRepository.get_underlying_uri(address)
    return Path(re.sub("^file://", "", found_at))


def model_of(case: Case, name: str) -> str:
    return case.copy_of(name).parent.name


def assert_wrong(report: AuditReport, *said: str) -> None:
    wrong = found(report)
    assert report.exit_code == 1, (report.outcome, found(report, "unchecked"))
    for each in said:
        assert any(each in one for one in wrong), (each, wrong)


def test_a_description_that_mlflow_cannot_load_is_wrong(case: Case) -> None:
    """The description has a tab after a colon, which other loaders read as YAML."""
    description = case.copy_of("fake") / "MLmodel"
    description.write_text(description.read_text().replace("model_id: ", "model_id:\t"))
    with pytest.raises(yaml.YAMLError):
        Model.load(str(description))
    for target in ("fake@champion", None):
        assert_wrong(case.audit(target), "MLmodel, python_env.yaml or requirements.txt: cannot be read")


# Fields of one record that contradict each other


def test_a_storage_location_that_differs_from_the_source_is_what_is_hashed(
    case: Case, tmp_path: Path
) -> None:
    other = other_copy(case, tmp_path / "elsewhere" / "artifacts")
    case.sql("UPDATE model_versions SET storage_location = ? WHERE name = 'fake'", other.as_uri())
    assert mlflow_loads(case, "models:/fake@champion") == mlflow_loads(case, "models:/fake/1") == other
    for target in ("fake@champion", "fake/1", None):
        assert_wrong(
            case.audit(target),
            f"copy fake/1: MLflow loads it from {other.as_uri()}",
            f"{WEIGHTS.partition('/')[2]}: sha256 is",
        )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["?x", "#x", " ", ";x", "%"])
def test_a_path_that_is_no_address_is_read_letter_by_letter(case: Case, ending: str) -> None:
    """A question mark begins a query in an address, and is a letter of a path."""
    place = case.copy_of("fake")
    other = other_copy(case, place.with_name(f"artifacts{ending}"))
    for table, field in (("model_versions", "storage_location"), ("logged_models", "artifact_location")):
        case.sql(f"UPDATE {table} SET {field} = ? WHERE {field} LIKE ?", str(other), f"%{place.parent.name}%")
    for address in ("models:/fake/1", f"models:/{place.parent.name}"):
        assert mlflow_loads(case, address) == other
    for target in ("fake@champion", None):
        assert_wrong(case.audit(target), "copy fake/1: ", "model.safetensors: sha256 is")


@pytest.mark.slow
def test_a_path_outside_that_looks_like_a_moved_workspace_is_what_is_hashed(
    case: Case, tmp_path: Path
) -> None:
    """Everything in MLflow agrees, and the workspace has an untouched copy at the end of the same path."""
    inside = case.copy_of("fake")
    other = other_copy(case, tmp_path / "evil" / "mlartifacts" / "models" / inside.parent.name / inside.name)
    for table, field in (
        ("model_versions", "storage_location"),
        ("model_versions", "source"),
        ("logged_models", "artifact_location"),
    ):
        case.sql(
            f"UPDATE {table} SET {field} = ? WHERE {field} LIKE ?", other.as_uri(), f"%{inside.parent.name}%"
        )
    for address in ("models:/fake@champion", f"models:/{inside.parent.name}"):
        assert mlflow_loads(case, address) == other
    report = case.audit("fake@champion")
    assert_wrong(report, f"MLflow loads it from {other.as_uri()}", "model.safetensors: sha256 is")


def test_a_place_that_all_records_but_the_files_agree_on_is_hashed(case: Case, tmp_path: Path) -> None:
    """Even ``run.json`` names the other place, but the bytes there are others."""
    inside = case.copy_of("fake")
    other = other_copy(case, tmp_path / "evil" / "mlartifacts" / "models" / inside.parent.name / inside.name)
    old = case.record.copies["fake"].location
    for table, field in (
        ("model_versions", "storage_location"),
        ("model_versions", "source"),
        ("logged_models", "artifact_location"),
    ):
        case.sql(f"UPDATE {table} SET {field} = ? WHERE {field} = ?", other.as_uri(), old)
    edit_json(case.run_json, lambda run: run["copies"]["fake"].update(location=other.as_uri()))
    edit_json(case.run_json, lambda run: run["copies"]["fake-strict"].update(location=other.as_uri()))
    assert_wrong(case.audit("fake@champion"), "copy fake/1: ", "model.safetensors: sha256 is")


def test_a_logged_model_that_mlflow_loads_by_its_id_is_hashed(case: Case, tmp_path: Path) -> None:
    """``models:/m-ID`` is resolved by the logged model alone."""
    other, model_id = other_copy(case, tmp_path / "elsewhere"), model_of(case, "fake")
    case.sql("UPDATE logged_models SET artifact_location = ? WHERE model_id = ?", other.as_uri(), model_id)
    assert mlflow_loads(case, f"models:/{model_id}") == other
    assert_wrong(
        case.audit(), f"policy: MLflow: logged model {model_id}: MLflow loads it from {other.as_uri()}"
    )


def test_files_of_a_model_that_nobody_published_are_found(case: Case) -> None:
    """The SFT model was published by no run; MLflow loads what lies at its address all the same."""
    client = MlflowClient(f"sqlite:///{case.workspace.root / 'mlflow.db'}")
    model_id = client.get_run(case.mlflow_run("sft")).data.tags["vantage.model"]
    place = case.workspace.root / "mlartifacts" / "models" / model_id / "artifacts"
    shutil.copytree(case.copy_of("fake"), place)
    assert_wrong(case.audit(), f"sft: MLflow: logged model {model_id}: ")


def test_the_source_that_mlflow_shows_is_compared(case: Case, tmp_path: Path) -> None:
    case.sql("UPDATE model_versions SET source = 'file:///elsewhere' WHERE name = 'fake'")
    assert_wrong(case.audit("fake/1"), "copy fake/1: its source is file:///elsewhere")


def test_a_version_that_leads_to_another_version_is_followed(case: Case) -> None:
    """MLflow follows an address that is itself one of a model."""
    case.sql("UPDATE model_versions SET storage_location = 'models:/fake-reward/1' WHERE name = 'fake'")
    assert mlflow_loads(case, "models:/fake/1") == Path("models:/fake-reward/1")
    assert_wrong(case.audit("fake/1"), "copy fake/1: MLflow loads it from", "manifest.json: sha256 is")


def test_versions_that_lead_to_one_another_end(case: Case) -> None:
    case.sql("UPDATE model_versions SET storage_location = 'models:/fake/1' WHERE name = 'fake'")
    assert_wrong(case.audit("fake/1"), "copy fake/1: ", "leads from one model to another")


def test_of_an_address_that_leads_to_no_model_no_folder_is_read(case: Case) -> None:
    """An empty path is this process's own folder."""
    nobody = f"models:/m-{'0' * 32}"
    case.sql("UPDATE model_versions SET storage_location = ? WHERE name = 'fake'", nobody)
    [check] = [each for each in found(case.audit("fake/1")) if "copy fake/1" in each]
    assert check.endswith("copy fake/1: MLflow finds no files of it")


def test_a_remote_address_that_no_run_recorded_is_not_fetched(
    case: Case, served: Callable[[], tuple[str, list[str]]]
) -> None:
    address, requests = served()
    # an address as MLflow's own servers have it, which MLflow would ask
    place = f"{address}/api/2.0/mlflow-artifacts/artifacts/models"
    case.sql("UPDATE model_versions SET storage_location = ? WHERE name = 'fake'", place)
    report = case.audit("fake/1")
    assert_wrong(report, f"MLflow loads it from {place}")
    assert_wrong(report, "it was not fetched")
    assert requests == []


# A workspace that was moved


def test_files_that_this_user_must_not_read_are_not_checked(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, is_dir = mlflow_loads(case, "models:/fake/1"), Path.is_dir

    def refused(path: Path) -> bool:
        """Answer as the kernel does where a folder above it is another user's."""
        if path.is_relative_to(copy):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    report = case.audit("fake@champion")
    assert report.exit_code == 2
    assert any(f"{copy} must not be read by this user" in each for each in found(report, "unchecked"))


def test_a_moved_workspace_is_reported_as_moved(case: Case) -> None:
    old = case.record.copies["fake"].location
    report = case.audit("fake@champion")
    assert (report.exit_code, found(report), found(report, "unchecked")) == (0, [], [])
    [note] = [each for each in found(report, "note") if "copy fake/1" in each]
    assert "the workspace was moved" in note and old in note


def test_an_old_place_that_differs_is_wrong(case: Case, original: Path, tmp_path: Path) -> None:
    """MLflow still loads from the old place."""
    old = tmp_path / "old" / "mlartifacts"
    shutil.copytree(original / "workspace" / "mlartifacts", old)
    before = (original / "workspace" / "mlartifacts").as_uri()
    moved_from(case, before, old.as_uri())
    assert case.audit("fake@champion").exit_code == 0
    place = mlflow_loads(case, "models:/fake@champion")
    assert place.is_relative_to(old)
    flip_bit(place / WEIGHTS)
    assert_wrong(
        case.audit("fake@champion"), f"copy fake/1: {place.as_uri()}: model: model.safetensors: sha256 is"
    )
    shutil.rmtree(old)
    report = case.audit("fake@champion")
    assert (report.exit_code, found(report)) == (0, [])
    [note] = [each for each in found(report, "note") if "copy fake/1" in each]
    assert "there are no files any longer" in note
    flip_bit(case.copy_of("fake") / WEIGHTS)
    assert case.audit("fake@champion").exit_code == 1


def moved_from(case: Case, before: str, after: str) -> None:
    """Let all records name ``after`` where they named ``before``, as if the workspace had been there."""
    for table, field in (
        ("model_versions", "storage_location"),
        ("model_versions", "source"),
        ("logged_models", "artifact_location"),
        ("experiments", "artifact_location"),
        ("runs", "artifact_uri"),
    ):
        case.sql(f"UPDATE {table} SET {field} = replace({field}, ?, ?)", before, after)
    text = case.run_json.read_text()
    assert before in text
    case.run_json.write_text(text.replace(before, after))


@pytest.fixture
def served() -> Iterator[Callable[[], tuple[str, list[str]]]]:
    """Yield an HTTP server on this machine, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield lambda: (f"http://127.0.0.1:{server.server_port}", asked)
        server.shutdown()
        thread.join()


def test_a_rollback_looks_at_the_files_that_mlflow_would_load(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same address is read before an alias is moved, or a model is exported."""
    address = f"sqlite:///{case.workspace.root / 'mlflow.db'}"
    assert problems_of_published(address, find_published(address, "fake", version="1")) == []
    other = other_copy(case, tmp_path / "elsewhere" / "artifacts")
    case.sql("UPDATE model_versions SET storage_location = ? WHERE name = 'fake'", other.as_uri())
    found_now = find_published(address, "fake", version="1")
    assert found_now.location == other.as_uri()
    assert any("model.safetensors: sha256 is" in each for each in problems_of_published(address, found_now))
