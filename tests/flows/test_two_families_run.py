"""Runs use reward models of other families than the policy's: trained from another model, a folder and MLflow."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.models.test_reward_folders import save_classifier
from tests.support.orchestrated import attempt_all, orchestrated
from tests.support.small_chat_run import save_chat_model
from vantage.cli.main import app
from vantage.flows.publishing.publishing import publish
from vantage.runs.pinning import pinned
from vantage.runs.planning import plan
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.attempt import RUN_STAGE

pytestmark = pytest.mark.slow

RECIPE = """\
recipe: families
seed: 3
model: {source: "builtin:nano"}
models:
  chat: {source: FOLDER/chat}
  bought: {source: FOLDER/classifier}
generation: {max_prompt_tokens: 48, max_response_tokens: 48}
data:
  preferences: {source: "builtin:arithmetic/preferences", rows: 48}
  prompts: {source: "builtin:arithmetic/prompts", rows: 16, split: {validation: 4, test: 4}}
rewards:
  main: {terms: [{model: reward}, {model: bought, weight: 0.5}]}
stages:
  reward: {kind: reward_model, init: chat, data: preferences, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
  collected: {kind: rollout_collection, policy: model, prompts: prompts, reward: main, samples_per_prompt: 2, batch_size: 16}
publish:
  - {stage: reward, registered_model: family-reward, alias: champion}
"""
UNUSED = ("chat", "preferences", "publish", "family-reward")
"""Words in lines of the recipe that a run without the stage ``reward`` has no use for."""


def run_it(workspace: Workspace, recipe: Path, *overrides: str) -> RunRecord:
    with orchestrated(
        workspace, recipe, *overrides, in_process=True, stage_function=RUN_STAGE
    ) as orchestrator:
        ended = attempt_all(orchestrator)
        assert {stage.status for stage in ended.values()} <= {"completed", "reused"}, ended
        for publication in orchestrator.recipe.publish:
            publish(publication, orchestrator)
        orchestrator.end()
        return orchestrator.run.record


def audited(workspace: Workspace, target: str) -> str:
    found = CliRunner().invoke(app, ["audit", target, "--workspace", workspace.address])
    assert found.exit_code == 0, found.stdout
    return found.stdout


@pytest.fixture(autouse=True)
def own_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_reward_models_of_other_families_through_whole_runs(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "chat")
    save_classifier(tmp_path / "classifier")
    workspace, recipe = Workspace(tmp_path / "workspace"), tmp_path / "families.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    first = run_it(workspace, recipe)
    assert first.stages["models.bought"].key_parts["kind"] == "import_reward_model"
    term = first.stages["collected"].key_parts["rewards"]["reward"]["terms"]
    assert [each["model"] for each in term] == [
        first.stages[step].digest for step in ("reward", "models.bought")
    ]
    shown = audited(workspace, first.run_id)
    assert "models.bought" in shown and "models.chat" in shown

    # A template with other text makes another reward model, and whatever it scored is made anew
    resolved, _ = load_resolved(recipe)
    before = {
        step.name: step.action
        for step in plan(pinned(resolved, workspace), workspace.storage, read_runs(workspace))
    }
    assert set(before.values()) == {"reuse"}
    settings = tmp_path / "classifier" / "chat_template.jinja"
    settings.write_text(settings.read_text().replace("assistant", "helper"))
    after = {
        step.name: step.action
        for step in plan(pinned(resolved, workspace), workspace.storage, read_runs(workspace))
    }
    assert (after["models.bought"], after["collected"], after["reward"]) == ("run", "wait", "reuse")

    # The registered reward model scores a run that knows nothing of its data
    registered = "models.bought.source=models:/family-reward@champion"
    second = run_it(workspace, recipe, registered, "publish=[]")
    assert second.recipe.models["bought"].source == f"models:/family-reward/1#{first.stages['reward'].digest}"
    assert second.stages["models.bought"].key_parts["kind"] == "import_reward_model"
    audited(workspace, second.run_id)
    # So does the same model by its stage, with the files and the lineage of the first run
    kept = [line for line in recipe.read_text().splitlines() if not any(word in line for word in UNUSED)]
    (tmp_path / "scored.yaml").write_text("\n".join(kept).replace("{model: reward}, ", ""))
    third = run_it(workspace, tmp_path / "scored.yaml", "models.bought.source=latest/reward")
    bought = third.stages["models.bought"]
    imported = workspace.storage.find(str(bought.stage_key))
    assert imported is not None
    assert imported.artifact.parents == {"source": first.stages["reward"].digest}
    assert bought.digest == second.stages["models.bought"].digest, "the same files"
    shown = audited(workspace, third.run_id)
    assert all(step in shown for step in ("models.bought", "models.chat", "data.preferences")), (
        "of the first run"
    )
    with pytest.raises(
        RunError, match="version 1 of family-reward is a reward model; name one that a policy"
    ):
        pinned(load_resolved(recipe, ["models.chat.source=models:/family-reward@champion"])[0], workspace)
