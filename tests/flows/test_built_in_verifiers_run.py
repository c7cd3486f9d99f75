"""A run whose reward has built-in verifiers records its scores, the versions of libraries and the isolation."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.real_runs import run_recipe
from vantage.attempts.jobs import steps_of
from vantage.runs.planning import plan, plan_warnings
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.tasks.rewards import libraries, sandbox

RECIPE = """
recipe: coded
seed: 3
model: {source: "builtin:nano"}
generation: {max_prompt_tokens: 16, max_response_tokens: 12}
data:
  tasks: {source: tasks.jsonl, columns: {prompt: question, answer: tests}, split: {validation: 4, test: 4}}
verifiers:
  tests: {source: "builtin:code", seconds: 2}
  short: {source: "builtin:length", at_most: 6}
  odd: {source: "builtin:regex", pattern: "[13579]", whole: false}
rewards:
  main: {terms: [{verifier: tests, weight: 4.0}, {verifier: short, weight: 2.0}, {verifier: odd}]}
stages:
  collected: {kind: rollout_collection, policy: model, reward: main, prompts: tasks, batch_size: 8, samples_per_prompt: 1}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded")
    rows = [
        # an empty program is wrong; any other that is valid Python prints nothing, which is right
        {"question": f"{n} a+{n}?", "tests": json.dumps({"inputs": ["1"], "outputs": [""]})}
        for n in range(24)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "coded.yaml").write_text(RECIPE)
    return folder / "coded.yaml"


@pytest.fixture(scope="module")
def ended(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, RunRecord]:
    workspace = Workspace(tmp_path_factory.mktemp("work"))
    record, printed = run_recipe(workspace, recipe, stage_function=RUN_STAGE)
    assert record.stages["collected"].status == "completed", printed
    return workspace, record


def folder_of(ended: tuple[Workspace, RunRecord], step: str) -> Path:
    """Return the folder of a step's artifact."""
    workspace, record = ended
    ref = workspace.storage.find(record.stages[step].stage_key or "")
    assert ref is not None
    return workspace.storage.folder(ref.artifact)


def is_python(text: str) -> bool:
    try:
        exec(compile(text, "<test>", "exec"), {})
    except BaseException:
        return False
    return bool(text.strip())


@pytest.mark.needs("isolation")
@pytest.mark.slow
def test_each_response_has_the_scores_that_its_text_gives(ended: tuple[Workspace, RunRecord]) -> None:
    with pa.memory_map(str(folder_of(ended, "collected") / "train.arrow")) as file:
        rows: list[dict[str, Any]] = pa.ipc.open_file(file).read_all().to_pylist()
    for row in rows:
        text = row["response"]
        expected = {
            "score.tests": float(is_python(text)),
            "score.short": float(len(text) <= 6),
            "score.odd": float(any(digit in text for digit in "13579")),
        }
        assert {name: row[name] for name in expected} == expected, text
        assert (
            row["score"] == 4 * expected["score.tests"] + 2 * expected["score.short"] + expected["score.odd"]
        )
    assert len({row["score"] for row in rows}) > 1, "equal scores would prove nothing"


@pytest.mark.needs("isolation")
@pytest.mark.slow
def test_versions_and_isolation_are_recorded(ended: tuple[Workspace, RunRecord]) -> None:
    _, record = ended
    odd, short = folder_of(ended, "verifiers.odd"), folder_of(ended, "verifiers.short")
    assert json.loads((odd / "libraries.json").read_text()).keys() == {"google-re2"}
    assert not (short / "libraries.json").exists()
    isolation = {name: stage.provenance.get("isolation") for name, stage in record.stages.items()}
    assert isolation["collected"] == isolation["verifiers.tests"] == sandbox.NAMESPACES
    assert {isolation[name] for name in isolation if name not in ("collected", "verifiers.tests")} == {None}


@pytest.mark.needs("isolation")
@pytest.mark.slow
def test_another_version_of_a_library_is_another_verifier(
    recipe: Path, ended: tuple[Workspace, RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, _ = ended
    resolved, _ = load_resolved(str(recipe), ())
    planned = plan(resolved, workspace.existing_storage, read_runs(workspace))
    assert {step.action for step in planned} == {"reuse"}
    monkeypatch.setattr(libraries, "version", lambda _: "99")
    planned = plan(resolved, workspace.existing_storage, read_runs(workspace))
    actions = {step.name: step.action for step in planned}
    assert actions["verifiers.odd"] == "run" and actions["collected"] != "reuse"
    assert actions["verifiers.short"] == actions["verifiers.tests"] == actions["data.tasks"] == "reuse"
    assert "libraries.google-re2" in " ".join(
        next(step.reasons for step in planned if step.name == "verifiers.odd")
    )


def test_the_plan_names_a_machine_that_does_not_isolate(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, _ = load_resolved(str(recipe), ())
    assert not [warning for warning in plan_warnings(resolved, []) if "isolate" in warning]
    monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "a test forbids it")
    assert plan_warnings(resolved, [])[-1] == (
        "verifiers.tests: programs are refused on this machine, which does not isolate them (a test forbids it)"
    )


def test_a_missing_library_is_refused_before_anything_runs(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise libraries.PackageNotFoundError(name)

    monkeypatch.setattr(libraries, "version", missing)
    resolved, _ = load_resolved(str(recipe), ())
    step = steps_of(resolved)["verifiers.odd"]
    with pytest.raises(libraries.LibraryMissing) as refused:
        step.key_parts({"prompts.0": "0" * 64})
    assert str(refused.value) == (
        "verifiers.odd.source=builtin:regex needs the package google-re2, which is not installed; pip install "
        "'vantage-rlhf[verifiers]'"
    )
