"""The commands of the pages run: on a finished run of fake stages, on runs that wait for a person, and on small files."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.site.documented_commands import ROOT, words_of
from tests.docs.site.documented_runs import ELSEWHERE, command_here, elsewhere, shown_commands
from tests.review.audit.conftest import STAGES, original, run_once, write_recipe
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.cli.main import app
from vantage.models.builtin import build_builtin
from vantage.runs.run import read_runs
from vantage.runs.workspace import DEFAULT_WORKSPACE, Workspace
from vantage.schemas.sweep import load_sweep

__all__ = ["original"]

SHOWN = [command for command in shown_commands() if elsewhere(command) is None]
UNIQUE = list(dict.fromkeys(map(command_here, SHOWN)))
ANSWERS = [command for command in UNIQUE if command.startswith(("approve ", "reject "))]
HERE = [command for command in UNIQUE if command not in ANSWERS]
ROWS = range(40)
FILES = {
    "questions.jsonl": [{"question": f"what is {each}?", "answer": str(each)} for each in ROWS],
    "train.jsonl": [{"question": f"what is {each}?", "answer": f"so\n#### {each}"} for each in ROWS],
    "tasks.jsonl": [{"question": f"what is {each}?", "answer": "1", "entry": "{}"} for each in ROWS],
    "labelled.jsonl": [{"prompt": f"{each}?", "response": "it is", "label": each % 2 == 0} for each in ROWS],
    "pairs.json": [
        {"instruction": f"{each}?", "input": "", "output": "good", "chosen": "good", "rejected": "bad"}
        for each in ROWS
    ],
    "instructions.json": [{"instruction": f"{each}?", "input": "", "output": "it is"} for each in ROWS],
}
ASKS = "stages.value.gate={metric: explained_variance, at_least: 0.9, on_fail: approve}"
"""The override with which a run waits for a person."""


def shown_yaml(page: str, first: str) -> str:
    """Return the one block of YAML on a page that begins with the field ``first``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [shown] = re.findall(rf"```yaml\n({first}: .*?)```", text, re.DOTALL)
    return str(shown)


def invoked(command: str, *, expected: int = 0) -> None:
    """Run a command, which must end with this exit code and print no error."""
    done = CliRunner().invoke(app, words_of(command))
    assert done.exit_code == expected, done.stderr or done.stdout[-2000:] or repr(done.exception)
    assert "vantage: " not in done.stderr.replace("vantage: warning: ", "")


@pytest.fixture(scope="module")
def scene(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a workspace of two runs of one recipe, its copy, keys, a model and data."""
    folder = tmp_path_factory.mktemp("scene")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "VANTAGE_KEY_PASSWORD"):
            patched.delenv(name, raising=False)
        patched.chdir(folder)
        write_recipe(folder).rename("recipe.yaml")
        shutil.copytree(original / "workspace", DEFAULT_WORKSPACE, symlinks=True)
        shutil.copytree(DEFAULT_WORKSPACE, "COPY", symlinks=True)
        run_once(Workspace(folder / DEFAULT_WORKSPACE), Path("recipe.yaml"))
        for name, rows in FILES.items():
            is_list = name.endswith(".json")
            Path(name).write_text(json.dumps(rows) if is_list else "\n".join(map(json.dumps, rows)))
        Path("small.yaml").write_text(shown_yaml("README.md", "recipe"))
        Path("rule.py").write_text("def verify(prompt, response, answer):\n    return True\n")
        build_builtin("tiny", folder / "MODEL_FOLDER", seed=1)
        for key in ("team.pem", "ada.pem"):
            invoked(f"keys new {key}")
        invoked("sign latest --key team.pem")
        invoked("init mine --yes --model MODEL_FOLDER --prompts questions.jsonl --verifier rule.py")
    return folder


@pytest.fixture
def here(scene: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the scene, and make it the folder in which commands run."""
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "VANTAGE_KEY_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(scene)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr("typer.launch", lambda address: 0)
    return scene


@pytest.fixture(scope="module")
def asking(original: Path, tmp_path_factory: pytest.TempPathFactory, ledger_database: str) -> Path:
    """Return the workspace of a run that waits for a person. Tests may only read it."""
    workspace = Workspace(tmp_path_factory.mktemp("asking") / "workspace")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", ledger_database)
        with orchestrated(
            workspace, original / "fake.yaml", ASKS, stage_function=STAGES, in_process=True
        ) as orchestrator:
            attempt_all(orchestrator)
            orchestrator.run.update(status=orchestrator.run.outcome())
            orchestrator.ledger.close()
    return workspace.root


def test_what_is_not_run_here_is_named_with_its_tests() -> None:
    shown = [*shown_commands()]
    unused = [start for start in ELSEWHERE if not any(re.match(start, command) for command in shown)]
    assert unused == []
    assert [each.tests for each in ELSEWHERE.values() if not (ROOT / "tests" / each.tests).is_file()] == []


def test_the_sweep_of_the_pages_loads(tmp_path: Path) -> None:
    (file := tmp_path / "pretraining.yaml").write_text(shown_yaml("docs/sweeps.md", "sweep"))
    assert len(load_sweep(file).cells()) == 6, "two arms and three seeds"


@pytest.mark.slow
@pytest.mark.parametrize("command", HERE, ids=lambda command: command[:60])
def test_a_documented_command_runs(command: str, here: Path) -> None:
    [_, record] = read_runs(Workspace(here / DEFAULT_WORKSPACE))
    command = command.replace("DIGEST", str(record.stages["reward"].digest)[:8])
    command = command.replace("MLFLOW_RUN", str(record.mlflow_run_id))
    if command.startswith("init "):
        shutil.rmtree(command.split()[1], ignore_errors=True)
    invoked(command, expected=1 if command.startswith("diff ") else 0)


@pytest.mark.slow
@pytest.mark.parametrize("command", ANSWERS, ids=lambda command: command[:60])
def test_a_documented_answer_is_taken(
    command: str,
    asking: Path,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ledger_database: str,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    shutil.copytree(asking, tmp_path / "workspace", symlinks=True)
    invoked(f"{command} --workspace {tmp_path / 'workspace'}")
    [record] = read_runs(Workspace(tmp_path / "workspace"))
    assert record.approvals
