"""A user's model folder and files of four layouts go through the whole chain, at reduced size, on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import WITH_BOTH
from tests.support.invented import (
    save_story_model,
    write_chinese_preferences,
    write_instructions,
    write_preferences,
    write_word_problems,
)
from tests.support.real_runs import FORKED_VANTAGE, environment_of_forks

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

REDUCED = [
    "generation.max_response_tokens=16",
    # at 16 tokens the two sides of many pairs are cut to the same, and a third of the Chinese prompts is too long
    "data.preferences.max_dropped=0.9",
    "stages.sft.epochs=0.1",
    "stages.reward.epochs=0.1",
    "stages.reward.gate.at_least=0.0",
    "stages.value.iterations=2",
    "stages.value.batch_size=16",
    "stages.value.minibatch_size=8",
    "stages.value.validation_samples=16",
    "stages.value.gate.at_least=-1000",
    "stages.policy.iterations=2",
    "stages.policy.batch_size=16",
    "stages.policy.minibatch_size=8",
    "stages.policy.validation_samples=16",
]


def command(workspace: Path, *overrides: str) -> list[str]:
    """Return what follows ``vantage`` in the command that runs the recipe."""
    sets = [part for override in overrides for part in ("--set", override)]
    return ["run", "instruct", "--workspace", str(workspace), "--json", *sets]


def reported(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Return what a run that has succeeded reported."""
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


@pytest.mark.timeout(1200)
def test_the_readmes_own_command_reaches_its_end(tmp_path: Path) -> None:
    """The command is given only the three sources, for a model ten thousand times smaller than the recipe is meant for."""
    words = command(
        tmp_path / "workspace",
        f"model.source={save_story_model(tmp_path / 'model', num_layers=2)}",
        f"data.demonstrations.source={write_instructions(tmp_path / 'instructions.json')}",
        f"data.preferences.source={write_preferences(tmp_path / 'preferences.json')}",
    )
    vantage = str(Path(sys.executable).with_name("vantage"))
    report = reported(subprocess.run([vantage, *words], capture_output=True, text=True))
    assert report["status"] == "completed"
    stages = report["stages"]
    assert isinstance(stages, dict)
    assert {stage["status"] for stage in stages.values()} == {"completed"}
    assert stages["reward"]["metrics"]["pair_accuracy"] > 0.8, "0.47 with rates for a model of 7 billion"
    assert 0.0 <= stages["evaluation"]["metrics"]["win_rate"] <= 1.0
    # 1,100 rows, some of them repeated; nothing else may be lost
    data = stages["data.demonstrations"]["metrics"]
    assert data["train_rows"] + data["validation_rows"] + data["test_rows"] + data["dropped_rows"] == 1100
    assert data["dropped_rows"] < 20


def test_other_layouts_word_problems_and_chinese_conversations(tmp_path: Path) -> None:
    """The data is JSON Lines with other column names, and Chinese preferences whose sides are messages."""
    words = command(
        tmp_path / "workspace",
        f"model.source={save_story_model(tmp_path / 'model', num_layers=2)}",
        f"data.demonstrations.source={write_word_problems(tmp_path / 'problems.jsonl')}",
        "data.demonstrations.columns={prompt: question, response: answer}",
        "data.demonstrations.rows=200",
        f"data.preferences.source={write_chinese_preferences(tmp_path / 'chinese.json')}",
        "data.preferences.columns={prompt: conversations, chosen: chosen, rejected: rejected}",
        "generation.max_prompt_tokens=300",
        *REDUCED,
    )
    report = reported(WITH_BOTH.run([*FORKED_VANTAGE, *words], timeout=600, env=environment_of_forks()))
    stages = report["stages"]
    assert isinstance(stages, dict)
    assert {stage["status"] for stage in stages.values()} == {"completed"}
    assert stages["reward"]["metrics"]["prompts_too_long"] > 0  # byte by byte, Chinese prompts are long
