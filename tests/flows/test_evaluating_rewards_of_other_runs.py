"""A reward model of another run is measured as its own run measured it, whatever model this run begins with."""

from pathlib import Path
from typing import Any

import pytest

from tests.flows.test_two_families_run import audited
from tests.support.answered_runs import go, ref_of
from tests.support.small_chat_run import save_chat_model
from vantage.runs.pinning import pinned
from vantage.runs.planning import plan
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import read_runs
from vantage.runs.workspace import RunError, Workspace

TRAINED = """\
recipe: trained
seed: 3
model: {source: "builtin:nano"}
models:
  chat: {source: FOLDER/chat}
generation: {max_prompt_tokens: 48, max_response_tokens: 48}
data:
  preferences: {source: "builtin:arithmetic/preferences", rows: 160, split: {validation: 0.1, test: 0.4}}
stages:
  own: {kind: reward_model, init: model, data: preferences, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
  other: {kind: reward_model, init: chat, data: preferences, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
  quality_own: {kind: reward_evaluation, reward_model: own, data: preferences}
  quality_other: {kind: reward_evaluation, reward_model: other, data: preferences}
"""
MEASURED = """\
recipe: measured
seed: 4
model: {source: "builtin:nano"}
models:
  bought: {source: SOURCE}
generation: {max_prompt_tokens: 48, max_response_tokens: 48}
data:
  preferences: {source: "builtin:arithmetic/preferences", rows: 160, split: {validation: 0.1, test: 0.4}}
stages:
  quality: {kind: reward_evaluation, reward_model: bought, data: preferences}
"""
MEASURES = ("pair_accuracy", "score_gap", "preference_loss", "brier_score", "expected_calibration_error")


@pytest.fixture(autouse=True)
def own_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def measured(workspace: Workspace, folder: Path, source: str) -> RunRecord:
    """Run the recipe that measures the reward model of this name."""
    recipe = folder / "measured.yaml"
    recipe.write_text(MEASURED.replace("SOURCE", source))
    return go(workspace, recipe)


def numbers(workspace: Workspace, record: RunRecord, stage: str) -> dict[str, Any]:
    metrics = ref_of(workspace, record, stage).artifact.metrics
    return {name: metrics[name] for name in MEASURES}


@pytest.mark.slow
def test_a_reward_model_is_measured_as_in_its_own_run(workspace: Workspace, tmp_path: Path) -> None:
    save_chat_model(tmp_path / "chat")
    recipe = tmp_path / "trained.yaml"
    recipe.write_text(TRAINED.replace("FOLDER", str(tmp_path)))
    first = go(workspace, recipe)
    assert {stage.status for stage in first.stages.values()} == {"completed"}, first.stages
    expected = {name: numbers(workspace, first, f"quality_{name}") for name in ("own", "other")}
    assert expected["own"]["score_gap"] != expected["other"]["score_gap"]

    for name, source in (("own", "latest/own"), ("other", f"{first.run_id}/other")):
        record = measured(workspace, tmp_path, source)
        assert numbers(workspace, record, "quality") == expected[name], "bit by bit"
        digest = first.stages[name].digest
        assert record.recipe.models["bought"].source == f"run:{first.run_id}/{name}#{digest}"
        imported = ref_of(workspace, record, "models.bought").artifact
        assert imported.parents == {"source": digest}
        quality = ref_of(workspace, record, "quality").artifact
        assert quality.parents["reward_model"] == imported.digest
        shown = audited(workspace, record.run_id)
        assert "models.bought" in shown and name in shown

    # A model that was trained again is measured again by a new run, and not by the plan of a recorded one
    recipe.write_text(recipe.read_text().replace("seed: 3", "seed: 5"))
    again = go(workspace, recipe)
    resolved, _ = load_resolved(tmp_path / "measured.yaml", ["models.bought.source=latest/own"])
    steps = plan(pinned(resolved, workspace), workspace.storage, read_runs(workspace))
    assert {step.name: step.action for step in steps}["models.bought"] == "run"
    record = measured(workspace, tmp_path, "latest/own")
    assert numbers(workspace, record, "quality") == numbers(workspace, again, "quality_own")
    assert numbers(workspace, record, "quality") != expected["own"]

    # A policy is no reward model
    resolved, _ = load_resolved(tmp_path / "measured.yaml", ["models.bought.source=latest/model"])
    with pytest.raises(RunError, match="latest/model"):
        pinned(resolved, workspace)
