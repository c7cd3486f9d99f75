"""The command line works as a user has it; tests that look at the process itself start one."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.support.fixtures import RECIPE
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import MEANINGS, ExitCode
from vantage.cli.main import app
from vantage.cli.run import summary
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.usefixtures("unsent")

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "prefect", "mlflow", "pandera", "datasets", "pyarrow")


def vantage(*arguments: str | Path) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, ledger_database: str) -> Workspace:
    """Return a workspace in which the recipe has run. Tests may only read it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "fake.yaml").write_text(RECIPE)
    workspace = Workspace(folder / "workspace")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", ledger_database)
        with orchestrated(workspace, folder / "fake.yaml", in_process=True) as orchestrator:
            attempt_all(orchestrator)
            orchestrator.run.update(status=orchestrator.run.outcome())
            orchestrator.ledger.close()  # what is sent in the background would change what is copied
    return workspace


@pytest.fixture
def finished(original: Workspace, workspace: Workspace) -> Workspace:
    """Return a copy of the workspace that a test may change."""
    shutil.copytree(original.root, workspace.root, symlinks=True)
    return workspace


ANSWER_ALL = """
import json, sys
from vantage.cli.main import main

for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print(arguments[0], "loaded:", sorted(set(HEAVY) & set(sys.modules)), end.code or 0, file=sys.stderr)
"""


@pytest.mark.slow
def test_answers_load_no_framework(recipe_file: Path, tmp_path: Path) -> None:
    """One process runs all commands, and prints after each which frameworks are loaded."""
    recipe = str(recipe_file)
    commands = [
        ["--help"],
        ["plan", recipe],
        ["plan", recipe, "--json"],
        ["estimate", recipe],
        ["estimate", recipe, "--gpu", "h200", "--json"],
        ["status"],
        ["schema"],
        ["run", "missing.yaml"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{ANSWER_ALL}", json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = [line for line in done.stderr.splitlines() if " loaded: " in line]
    assert loaded == [
        f"{words[0]} loaded: [] {int(ExitCode.BAD_INPUT) if words[0] == 'run' else 0}" for words in commands
    ]


def test_a_finished_recipe_run_again_is_one_line_of_json(finished: Workspace, recipe_file: Path) -> None:
    done = vantage("run", recipe_file, "--workspace", finished.root, "--json")
    assert done.exit_code == 0, done.stderr
    [line] = done.stdout.splitlines()
    told = json.loads(line)
    assert set(told) == {"run_id", "status", "stages"}
    assert told["run_id"].startswith("0002-fake-")
    assert told["status"] == "completed"
    assert list(told["stages"])[:2] == ["model", "data.demonstrations"]
    assert {stage["status"] for stage in told["stages"].values()} == {"reused"}
    assert told["stages"]["value"]["metrics"] == {"explained_variance": 0.4}
    assert all(len(stage["stage_key"]) == len(stage["digest"]) == 64 for stage in told["stages"].values())
    assert "reused" in done.stderr, "people read standard error then"


AGAIN = """
import sys, subprocess
start = subprocess.Popen.__init__
def only_questions(self, command, *rest, **more):  # git knows the code's revision, uname MLflow's processor
    assert command[0].endswith(("git", "uname")), f"{command} was started"
    start(self, command, *rest, **more)
subprocess.Popen.__init__ = only_questions
from vantage.cli.main import main
try:
    main()
finally:
    print("loaded:", sorted({"prefect", "torch"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run_again(
    original: Workspace, tmp_path_factory: pytest.TempPathFactory, ledger_database: str
) -> subprocess.CompletedProcess[str]:
    """Run ``vantage run`` of the finished recipe in a process of its own, whose output goes to a file."""
    folder = tmp_path_factory.mktemp("again")
    shutil.copytree(original.root, folder / "workspace", symlinks=True)
    (folder / "fake.yaml").write_text(RECIPE)
    return subprocess.run(
        [sys.executable, "-c", AGAIN, "run", "fake.yaml", "--workspace", "workspace"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": ledger_database},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_second_run_starts_neither_prefect_nor_a_child(
    run_again: subprocess.CompletedProcess[str],
) -> None:
    assert run_again.returncode == 0, run_again.stderr
    assert "loaded: []" in run_again.stderr


def test_what_is_printed_to_a_file_has_no_control_codes(run_again: subprocess.CompletedProcess[str]) -> None:
    assert "\x1b" not in run_again.stdout + run_again.stderr
    assert "gate explained_variance 0.400 >= 0.3: passed" in run_again.stdout
    assert re.search(r"^  pages   \S*vantage ui --workspace \S+$", run_again.stdout, re.MULTILINE)


def test_a_closed_gate_has_an_exit_code_of_its_own(finished: Workspace, recipe_file: Path) -> None:
    options = ["--workspace", str(finished.root), "--set", "stages.value.gate.at_least=0.9", "--json"]
    done = vantage("run", recipe_file, *options)
    assert done.exit_code == ExitCode.GATE_CLOSED
    told = json.loads(done.stdout)
    assert told["status"] == "gate_closed"
    assert told["stages"]["policy"]["status"] == "blocked"


def test_plan_tells_a_program_why(finished: Workspace, recipe_file: Path) -> None:
    options = [
        "--workspace",
        str(finished.root),
        "--set",
        "stages.policy.algorithm.clip_range_high=0.2",
        "--json",
    ]
    done = CliRunner().invoke(app, ["plan", str(recipe_file), *options])
    assert done.exit_code == 0
    steps = {step["name"]: step for step in json.loads(done.stdout)["steps"]}
    assert [name for name, step in steps.items() if step["action"] != "reuse"] == ["policy", "evaluation"]
    assert steps["policy"]["reasons"] == ["configuration.algorithm.clip_range_high: 0.28 → 0.2"]
    assert steps["evaluation"]["waits_for"] == ["policy"]
    assert steps["value"]["verdicts"][0]["passed"] is True


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("critic: value", "critic: sft", "stages.policy.critic"),
        ("kind: sft", "kind: stf", "did you mean 'sft'?"),
        ("data: demonstrations}", "data: demonstration}", "did you mean 'demonstrations'?"),
        ("recipe: fake", "recipe: [", "fake.yaml:"),
        ("seed: 17", "seed: !!python/object/apply:os.system [ls]", "fake.yaml:2"),
        ("at_least: 0.75", "at_least: high", "stages.reward.gate"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_recipe_with_a_mistake_is_refused_without_a_traceback(
    command: str, old: str, new: str, said: str, recipe_file: Path, tmp_path: Path
) -> None:
    text = recipe_file.read_text()
    assert old in text
    recipe_file.write_text(text.replace(old, new))
    done = CliRunner().invoke(app, [command, str(recipe_file), "--workspace", str(tmp_path / "workspace")])
    assert done.exit_code == ExitCode.BAD_INPUT
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "workspace").exists()


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["run", "no-such-recipe"], ExitCode.BAD_INPUT, "is neither a file nor a built-in recipe"),
        (["run", "."], ExitCode.BAD_INPUT, "is not a file"),
        (["plan", "RECIPE", "--set", "stages.policy.epochs"], ExitCode.BAD_INPUT, "stages.policy.epochs"),
        (["plan", "RECIPE", "--set", "stages.nobody.epochs=2"], ExitCode.BAD_INPUT, "nobody"),
        (["resume", "0001-fake-0a1b2c"], ExitCode.BAD_INPUT, "there is no run 0001-fake-0a1b2c"),
        (["resume", "../../etc"], ExitCode.BAD_INPUT, "is not one of Vantage's"),
        (["status", "latest"], ExitCode.BAD_INPUT, "there is no run in"),
        (["status", "17"], ExitCode.BAD_INPUT, "status` lists the runs"),
        (["run", "RECIPE", "--workspace", "RECIPE"], ExitCode.BAD_INPUT, "name another with --workspace DIR"),
        (["fly"], ExitCode.USAGE, "fly"),
    ],
)
def test_bad_input_is_refused_without_a_traceback(
    arguments: list[str],
    code: int,
    said: str,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [str(recipe_file) if word == "RECIPE" else word for word in arguments])
    assert done.exit_code == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_more_gpus_than_there_are_is_refused_before_anything_begins(
    workspace: Workspace, recipe_file: Path
) -> None:
    done = vantage(
        "run", recipe_file, "--workspace", workspace.root, "--set", "stages.policy.resources.gpus=64"
    )
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "stages.policy.resources.gpus=64 is more than this machine's" in done.stderr
    assert not (workspace.root / "events.txt").exists()


def test_resume_goes_on_with_the_run_that_is_named(finished: Workspace, recipe_file: Path) -> None:
    [run_id] = [path.name for path in finished.runs.iterdir() if path.is_dir()]
    done = vantage("resume", run_id, "--workspace", finished.root, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["run_id"] == run_id


def test_status_lists_runs_and_shows_one(finished: Workspace) -> None:
    [run_id] = [path.name for path in finished.runs.iterdir() if path.is_dir()]
    folder = ["--workspace", str(finished.root)]
    assert run_id in CliRunner().invoke(app, ["status", *folder]).stdout
    assert "explained_variance 0.4" in CliRunner().invoke(app, ["status", run_id, *folder]).stdout
    told = json.loads(CliRunner().invoke(app, ["status", *folder, "--json"]).stdout)
    assert [run["run_id"] for run in told["runs"]] == [run_id]
    told = json.loads(CliRunner().invoke(app, ["status", run_id, *folder, "--json"]).stdout)
    assert told["stages"]["value"]["status"] == "completed"
    assert told["stages"]["value"]["progress"] is None


def test_status_of_an_empty_workspace_is_no_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["status", "--workspace", str(tmp_path / "nothing")])
    assert done.exit_code == 0
    assert "no runs in" in done.stdout
    assert not (tmp_path / "nothing").exists()


def test_schema_describes_the_recipe() -> None:
    told = json.loads(CliRunner().invoke(app, ["schema"]).stdout)
    assert {"recipe", "stages", "rewards", "verifiers", "data"} <= set(told["properties"])


def test_the_summary_holds_nothing_else(finished: Workspace) -> None:
    told = summary(read_runs(finished)[0])
    assert set(told["stages"]["sft"]) == {"status", "stage_key", "digest", "metrics"}


@pytest.mark.parametrize("garbage", ["", '{"run_id": ', "[]", "\0\0", "another run's", None])
def test_a_damaged_run_is_named_and_the_others_are_shown(
    finished: Workspace, recipe_file: Path, garbage: str | None
) -> None:
    (intact,) = read_runs(finished)
    damaged = "0002-fake-0a1b2c"
    record = finished.folder(damaged) / "run.json"
    record.parent.mkdir()
    if garbage == "another run's":
        record.write_bytes((finished.folder(intact.run_id) / "run.json").read_bytes())
    elif garbage is not None:
        record.write_text(garbage)

    def shown(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, [*arguments, "--workspace", str(finished.root)])
        return done.exit_code, done.stdout, done.stderr

    code, out, err = shown("status")
    assert code == ExitCode.OK
    assert intact.run_id in out and damaged not in out
    assert str(record) in err and "move the folder away" in err

    told = json.loads(shown("status", "--json")[1])
    assert [run["run_id"] for run in told["runs"]] == [intact.run_id]
    assert len(told["damaged"]) == 1 and str(record) in told["damaged"][0]

    for command in (("plan", str(recipe_file)), ("status", intact.run_id)):
        code, _, err = shown(*command)
        assert code == ExitCode.OK and str(record) in err
    for command in (("resume", damaged), ("status", damaged)):
        code, _, err = shown(*command)
        assert code == ExitCode.BAD_INPUT
        assert err.count(str(record)) == 1 and "move the folder away" in err


def test_the_version_is_that_of_the_installed_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"vantage {version('vantage-rlhf')}\n")


def test_help_and_the_page_of_commands_know_every_exit_code() -> None:
    told = " ".join(re.sub("[│╭╮╰╯─]", " ", CliRunner().invoke(app, ["--help"]).stdout).split())
    page = " ".join((ROOT / "docs" / "commands.md").read_text(encoding="utf-8").split())
    for code in ExitCode:
        for text in (told, page.partition("Exit codes:")[2]):
            assert f" {int(code)} {MEANINGS[code]}" in text, f"{int(code)} is missing"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_for_shells(shell: str) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("vantage"))],
        env={**os.environ, "_VANTAGE_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_VANTAGE_COMPLETE=complete" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, completed",
    [
        ("vantage plan quick", "quickstart"),
        ("vantage status --workspace WORKSPACE la", "latest"),
        ("vantage resume --workspace WORKSPACE 0001-f", "0001-fake-"),
    ],
)
def test_recipes_and_runs_are_completed(words: str, completed: str, finished: Workspace) -> None:
    words = words.replace("WORKSPACE", str(finished.root))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("vantage"))],
        env={
            **os.environ,
            "_VANTAGE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(completed)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("named", ["1", "0001", "0001-fa", "latest"])
def test_a_run_may_be_named_shortly(named: str, finished: Workspace) -> None:
    folder = ["--workspace", str(finished.root)]
    told = json.loads(CliRunner().invoke(app, ["status", named, "--json", *folder]).stdout)
    assert told["run_id"].startswith("0001-fake-")
    done = vantage("resume", named, "--json", *folder)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["run_id"] == told["run_id"]


def read_by_head(*arguments: str | Path) -> tuple[int, str]:
    """Return (exit code, standard error) of a command whose reader closes the pipe before the first line is written."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_vantage", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    os.close(reading)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "RECIPE"],
        ["plan", "RECIPE", "--json"],
        ["status"],
        ["status", "1"],
        ["schema"],
        ["run", "RECIPE"],
    ],
)
def test_a_reader_that_has_gone_is_no_fault(
    arguments: list[str], finished: Workspace, recipe_file: Path
) -> None:
    words = [str(recipe_file) if word == "RECIPE" else word for word in arguments]
    place = [] if words == ["schema"] else ["--workspace", str(finished.root)]
    assert read_by_head(*words, *place) == (0, "")
    if words[0] == "run":
        assert read_runs(finished)[0].status == "completed"
