"""An attempt records code, environment and machine at little cost; only the computation is made up."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vantage.attempts import run_attempt as subject
from vantage.attempts.identity.environment import environment
from vantage.attempts.identity.identity import identity
from vantage.attempts.identity.package import package_digest
from vantage.attempts.identity.revision import revision
from vantage.attempts.jobs import request_for, steps_of
from vantage.attempts.provenance import provenance
from vantage.attempts.run_attempt import run_attempt
from vantage.runs.planning import check_drift, plan
from vantage.runs.resolving import load_resolved
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.attempt import RUN_STAGE, AttemptOutcome, Share
from vantage.schemas.records.job import StageJob, StageResult
from vantage.storage.environments import read_environment
from vantage.storage.storage import Storage


class Computed:
    """A launcher without a process."""

    def launch(
        self,
        job: StageJob,
        *,
        log: Path,
        share: Share | None = None,
        stop: threading.Event | None = None,
        on_poll: Callable[[], None] | None = None,
        function: str = RUN_STAGE,
        hang_seconds: float | None = None,
    ) -> StageResult:
        (job.output / "weights.txt").write_text("w")
        return StageResult(metrics={}, tokenizer_digest="d" * 64)


@pytest.fixture
def recipe(recipe_file: Path) -> ResolvedRecipe:
    return load_resolved(recipe_file)[0]


def attempt(recipe: ResolvedRecipe, storage: Storage, log: Path) -> AttemptOutcome:
    request = request_for(steps_of(recipe)["model"], {}, run_id="r", storage="unused", log=log)
    return run_attempt(request, storage=storage, launcher=Computed())


def test_it_is_recorded_with_the_artifact_by_the_process_that_computes(
    workspace: Workspace, recipe: ResolvedRecipe, tmp_path: Path
) -> None:
    outcome = attempt(recipe, workspace.storage, tmp_path / "log")
    assert outcome.artifact is not None
    ref = workspace.storage.find(outcome.artifact.stage_key)
    assert ref is not None
    assert ref.provenance == outcome.provenance
    assert identity().items() <= outcome.provenance.items()
    assert provenance("import_model", threads=1, world_size=1).keys() <= outcome.provenance.keys()
    assert read_environment(workspace.storage, outcome.provenance["environment"]) == environment()


@pytest.mark.slow
def test_in_a_bucket(
    bucket: str, recipe: ResolvedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage in a bucket keeps the environment that the provenance names."""
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    storage = Workspace.at(bucket).storage
    outcome = attempt(recipe, storage, tmp_path / "log")
    assert read_environment(storage, outcome.provenance["environment"]) == environment()


def test_another_revision_machine_or_image_is_no_drift_and_strict_lets_it_pass(
    workspace: Workspace, recipe: ResolvedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {
        "revision": "a" * 40,
        "dirty": "yes",
        "package": "b" * 64,
        "cpu": "other",
        "image": "vantage:1",
    }
    monkeypatch.setattr(subject, "identity", lambda: {**identity(), **elsewhere})
    monkeypatch.setattr(subject, "provenance", planned := lambda kind, **_: {"torch": "2.13.0"})
    monkeypatch.setattr("vantage.runs.planning.provenance", planned)
    outcome = attempt(recipe, workspace.storage, tmp_path / "log")
    assert outcome.provenance["revision"] == "a" * 40
    (step,) = [each for each in plan(recipe, workspace.storage, []) if each.name == "model"]
    assert (step.action, step.drift) == ("reuse", ())
    check_drift([step])


def test_an_artifact_of_an_earlier_version_is_no_drift(
    workspace: Workspace, recipe: ResolvedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "identity", dict)
    monkeypatch.setattr(subject, "provenance", planned := lambda kind, **_: {"torch": "2.13.0"})
    monkeypatch.setattr("vantage.runs.planning.provenance", planned)
    assert attempt(recipe, workspace.storage, tmp_path / "log").provenance == {"torch": "2.13.0"}
    (step,) = [each for each in plan(recipe, workspace.storage, []) if each.name == "model"]
    assert (step.action, step.drift) == ("reuse", ())


def test_it_is_read_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process reads the machine and its environment once."""
    identity()
    before = package_digest.cache_info().misses, revision.cache_info().misses
    began = time.process_time()
    for _ in range(20):
        identity()
    assert (time.process_time() - began) / 20 < 0.1, "seconds of this process's CPU"
    assert (package_digest.cache_info().misses, revision.cache_info().misses) == before
    assert min(before) >= 1
