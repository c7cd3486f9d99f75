"""Learning rates that are left to the model are filled in on the command line."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.models.builtin import build_builtin
from vantage.runs.resolving import load_resolved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder that says its width, and two files of data."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 64}')
    for name in ("instructions", "preferences"):
        (tmp_path / f"{name}.json").write_text("[]")
    return tmp_path


def sets(folder: Path, *more: str) -> list[str]:
    return [
        f"model.source={folder / 'model'}",
        f"data.demonstrations.source={folder / 'instructions.json'}",
        f"data.preferences.source={folder / 'preferences.json'}",
        *more,
    ]


def plan(folder: Path, *more: str) -> list[str]:
    words = [word for text in sets(folder, *more) for word in ("--set", text)]
    return ["plan", "instruct", *words, "--workspace", str(folder / "workspace")]


def test_instruct_takes_its_rates_from_the_width_of_the_model(folder: Path) -> None:
    recipe, chosen = load_resolved("instruct", sets(folder, "stages.reward.learning_rate=5e-4"))
    assert recipe.stages["sft"].learning_rate == 1.3e-3  # type: ignore[union-attr]
    assert recipe.stages["reward"].learning_rate == 5e-4  # type: ignore[union-attr]
    assert chosen == {
        "sft": {"learning_rate": 1.3e-3},
        "value": {"learning_rate": 6.4e-4},
        "policy": {"learning_rate": 6.4e-5, "critic_learning_rate": 1.3e-4},
    }


def test_mlflow_is_not_asked_for_the_width_of_a_registered_model(folder: Path) -> None:
    """A recipe is also loaded where no server answers, so the rate has to be given."""
    recipe = {
        "recipe": "scored",
        "model": {"source": "builtin:tiny"},
        "models": {"champion": {"source": "models:/chat@champion"}},
        "data": {"pairs": {"source": "builtin:arithmetic/preferences", "rows": 64}},
        "stages": {
            "reward": {
                "kind": "reward_model", "init": "champion", "data": "pairs", "epochs": 1, "batch_size": 4,
            },
        },
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.raises(
        ValueError,
        match=r"stages\.reward\.learning_rate: left to the model's width, but MLflow is not asked about "
        r"models:/chat@champion when a recipe is loaded; give a number",
    ):
        load_resolved(folder / "recipe.yaml")
    load_resolved(folder / "recipe.yaml", ["stages.reward.learning_rate=1e-4"])


def test_a_plan_shows_them(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    build_builtin("tiny", folder / "model", seed=0)
    width = json.loads((folder / "model" / "config.json").read_text())["hidden_size"]
    sft, policy, critic = (float(f"{rate * 4096 / width:.2g}") for rate in (2e-5, 1e-6, 2e-6))
    done = CliRunner().invoke(app, plan(folder))
    assert done.exit_code == 0, done.output
    assert f"sft: learning_rate {sft:g}, chosen for the width of the model" in done.stdout
    assert (
        f"policy: learning_rate {policy:g}, critic_learning_rate {critic:g}, chosen for the width"
        in done.stdout
    )
    told = json.loads(CliRunner().invoke(app, [*plan(folder), "--json"]).stdout)
    assert told["chosen"]["sft"] == {"learning_rate": sft}


def test_a_model_that_does_not_say_its_width_is_refused_with_the_fields(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("{}")
    done = CliRunner().invoke(app, plan(folder))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "stages.sft.learning_rate, stages.reward.learning_rate" in done.stderr
    assert "--set stages.NAME.learning_rate=" in done.stderr
    rates = [f"stages.{name}.learning_rate=1e-4" for name in ("sft", "reward", "value", "policy")]
    _, chosen = load_resolved("instruct", sets(folder, *rates, "stages.policy.critic_learning_rate=1e-4"))
    assert chosen == {}
