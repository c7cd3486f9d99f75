"""Make a run of fake stages whose recipe signs, once, and copy it for each test that changes something."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_work import run_stage
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.job import StageJob, StageResult
from vantage.signing.keys import PASSWORD, SigningKey, new_key

RECIPE = """\
recipe: signed
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  preferences: {source: "builtin:arithmetic/preferences"}
stages:
  sft: {kind: sft, data: demonstrations}
  reward: {kind: reward_model, init: sft, data: preferences, gate: {metric: pair_accuracy, at_least: 0.75}}
sign: {key: keys/key.pem}
"""
STEPS = ["model", "data.demonstrations", "data.preferences", "sft", "reward"]
CANARY = "canary-in-a-password-8213"


@dataclass(frozen=True)
class Keys:
    """Key pairs in one folder, and a recipe beside them."""

    folder: Path
    own: SigningKey
    """Encrypted with ``CANARY``."""
    other: SigningKey

    @property
    def recipe(self) -> Path:
        return self.folder.parent / "signed.yaml"


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("signing") / "keys"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(PASSWORD, CANARY)
        own = new_key(folder / "key.pem")
        changed.delenv(PASSWORD)
        made = Keys(folder, own, new_key(folder / "other.pem"))
    made.recipe.write_text(RECIPE)
    return made


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, CANARY)


@dataclass(frozen=True)
class Ended:
    """A workspace with one finished run, and what was said while it ran."""

    workspace: Workspace
    lines: tuple[str, ...] = ()

    @property
    def record(self) -> RunRecord:
        return read_runs(self.workspace)[0]


class Here:
    """Computes fake stages in this process: what signs knows nothing of processes."""

    def launch(self, job: StageJob, **_: Any) -> StageResult:
        return run_stage(job)


def run_recipe(workspace: Workspace, recipe: Path, *overrides: str) -> Ended:
    """Return a finished run of the recipe."""
    with orchestrated(workspace, recipe, *overrides) as orchestrator:
        orchestrator._launcher = Here()
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
        orchestrator.ledger.close()  # what is sent in the background would change a workspace that is copied
        lines: list[str] = getattr(orchestrator.watcher, "lines")  # noqa: B009  (of a Witness)
    return Ended(workspace, tuple(lines))


@pytest.fixture(scope="session")
def ended(keys: Keys, tmp_path_factory: pytest.TempPathFactory, ledger_database: str) -> Iterator[Ended]:
    """Yield one signed run, which no test changes."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(PASSWORD, CANARY)
        changed.setenv("MLFLOW_TRACKING_URI", ledger_database)
        yield run_recipe(Workspace(tmp_path_factory.mktemp("ended") / "workspace"), keys.recipe)


@pytest.fixture
def copied(ended: Ended, tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Return a copy of it on another path, which a test may change."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    shutil.copytree(ended.workspace.root, tmp_path / "copied")
    return Ended(Workspace(tmp_path / "copied"), ended.lines)
