"""Make a finished run with gates, parents and registered models once; each test tampers with a copy of its own."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.review.audit.remembered_answers import RememberedAnswers
from tests.review.audit.tampering import Case
from tests.support.made_once import made_once
from tests.support.mlflow_databases import ReusedFolder, forget_databases
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.energy import EnergyMeter
from vantage.attempts.identity import environment
from vantage.flows.publishing.publishing import publish
from vantage.ledger import tracking
from vantage.ledger.critic_page import diagnosis_plots
from vantage.review.audit import small_files
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.energy import Energy

RECIPE = """\
recipe: fake
seed: 17
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: demonstrations.jsonl}
  preferences: {source: "builtin:arithmetic/preferences"}
  prompts: {source: "builtin:arithmetic/prompts"}
rewards:
  main: {terms: [{model: reward}]}
stages:
  sft: {kind: sft, data: demonstrations}
  reward: {kind: reward_model, init: sft, data: preferences, gate: {metric: pair_accuracy, at_least: 0.75}}
  value:
    kind: value_pretraining
    policy: sft
    init: reward
    reward: main
    prompts: prompts
    gate: {metric: explained_variance, at_least: 0.3}
  policy:
    kind: policy_optimization
    algorithm: {preset: vapo, length_adaptive_alpha: 1.0}
    init: sft
    critic: value
    reward: main
    prompts: prompts
  evaluation:
    kind: evaluation
    candidate: policy
    baseline: sft
    critic: value
    judge: {verifier: arithmetic}
    prompts: prompts
    gate: {metric: accuracy_gain, at_least: 0.0}
  strict:
    kind: evaluation
    candidate: policy
    baseline: sft
    judge: {verifier: arithmetic}
    prompts: prompts
    samples_per_prompt: 2
    gate: {metric: accuracy_gain, at_least: 0.9, on_fail: continue}
publish:
  - {stage: policy, registered_model: fake, alias: champion, after: evaluation}
  - {stage: policy, registered_model: fake-strict, alias: best, after: strict}
  - {stage: reward, registered_model: fake-reward}
"""
SHORT_RECIPE = """\
recipe: fake
seed: 17
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: demonstrations.jsonl}
  prompts: {source: "builtin:arithmetic/prompts"}
stages:
  sft: {kind: sft, data: demonstrations}
  evaluation:
    kind: evaluation
    candidate: sft
    baseline: model
    judge: {verifier: arithmetic}
    prompts: prompts
    gate: {metric: accuracy_gain, at_least: 0.0}
publish:
  - {stage: sft, registered_model: fake, alias: champion, after: evaluation}
"""
"""A recipe whose run has a row in every table that Vantage fills, and whose audit takes half as long."""
DISTRIBUTIONS = ("mlflow", "torch", "transformers")
STAGES = "tests.review.audit.audited_work.run_stage"


def run_once(
    workspace: Workspace, recipe: Path, *overrides: str, until: str | None = None, in_process: bool = True
) -> None:
    """Run the recipe as ``vantage run`` does, without Prefect.

    Args:
        until: the process ends before this step.
        in_process: stages are computed in this process; not where one of them is lost.
    """
    with orchestrated(
        workspace, recipe, *overrides, stage_function=STAGES, in_process=in_process
    ) as orchestrator:
        attempt_all(orchestrator, until=until)
        if until is None:
            for publication in orchestrator.recipe.publish:
                publish(publication, orchestrator)
            orchestrator.end()
        orchestrator.ledger.flush()
        orchestrator.ledger.close()


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    """Return the recipe with its one file of data."""
    (folder / "demonstrations.jsonl").write_text('{"prompt": "1+1?", "response": "2"}\n' * 40)
    recipe = folder / "fake.yaml"
    recipe.write_text(text)
    return recipe


def _run_of(text: str, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patched, _few_distributions():
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        patched.setattr(EnergyMeter, "finish", lambda self: Energy(gpu_joules=7.25, cpu_joules=3.5))
        run_once(Workspace(folder / "workspace"), write_recipe(folder, text))


def _copied(original: Path, folder: Path) -> Case:
    shutil.copytree(original / "workspace", folder, symlinks=True)
    workspace = Workspace(folder)
    [record] = read_runs(workspace)
    return Case(workspace, record, original)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe, its data, and the workspace of a run of it. Tests may only read it."""
    return made_once(tmp_path_factory, "audited", lambda folder: _run_of(RECIPE, folder))


@contextmanager
def _few_distributions() -> Iterator[None]:
    """Let runs record three of the installed distributions: to write the bill of all takes half of a small run's time.

    Plots on the pages of critics are empty: no audit looks at them, and they take a tenth.
    """
    found = {name: each for name, each in environment._installed().items() if name in DISTRIBUTIONS}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(environment, "_installed", lambda: found)
        patched.setattr(diagnosis_plots, "svg", lambda draw, *, label: "<svg></svg>")
        environment.environment.cache_clear()
        yield
    environment.environment.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def few_distributions() -> Iterator[None]:
    """Let runs record three of the installed distributions."""
    with _few_distributions():
        yield


@pytest.fixture(scope="session")
def answers() -> RememberedAnswers:
    """Return what MLflow has answered in this process."""
    return RememberedAnswers()


@pytest.fixture
def every_question(answers: RememberedAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let audits ask MLflow all that they ask, for a test that counts the questions."""
    monkeypatch.setattr(answers, "asks_again", True)


@pytest.fixture(autouse=True, scope="module")
def reused_copies(answers: RememberedAnswers) -> Iterator[None]:
    """Let one audit after the other copy its database to one place, and let MLflow read its own migrations once.

    It is asked anew only about databases with another content, and a description of a model is parsed once.
    """
    tracking.set_up_client()
    from mlflow.store.db import utils

    from vantage.ledger.to_mlflow import audited_runs

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(audited_runs, "tempfile", SimpleNamespace(TemporaryDirectory=ReusedFolder))
        remembering = lru_cache(64)(yaml.load)  # nearly all descriptions of models are equal
        patched.setattr(small_files, "yaml", SimpleNamespace(load=remembering, YAMLError=yaml.YAMLError))
        patched.setattr(utils, "_get_latest_schema_revision", cache(utils._get_latest_schema_revision))
        answers.patch(patched)
        yield
    forget_databases()
    ReusedFolder.remove()


@pytest.fixture
def case(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return a copy of the workspace on another path."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return _copied(original, tmp_path / "copy")


@pytest.fixture
def short_case(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Case:
    """Return a case of the short recipe."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    original = made_once(tmp_path_factory, "audited-short", lambda folder: _run_of(SHORT_RECIPE, folder))
    return _copied(original, tmp_path / "copy")


@pytest.fixture
def again(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], RunRecord]:
    """Return a function that puts a second run of the same recipe, which reuses all, into an unchanged copy."""

    def make(folder: Path) -> None:
        shutil.copytree(original / "workspace", folder / "workspace", symlinks=True)
        run_once(Workspace(folder / "workspace"), original / "fake.yaml")

    def run(case: Case) -> RunRecord:
        root = case.workspace.root
        root.rename(root.with_name("before the second run"))
        shutil.copytree(made_once(tmp_path_factory, "audited-twice", make) / "workspace", root, symlinks=True)
        return read_runs(case.workspace)[0]

    return run
