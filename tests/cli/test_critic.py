"""``vantage critic`` on runs of fake stages shows what it finds, and prints that it finds nothing where that is so."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.schemas.critic_samples import diagnosis
from tests.support.fixtures import RECIPE
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.ledger.journal import Journal
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.usefixtures("unsent")

ROOT = Path(__file__).parents[2]


def shown(place: Workspace | str, *arguments: str) -> Result:
    at = place if isinstance(place, str) else str(place.root)
    return CliRunner().invoke(app, ["critic", *arguments, "--workspace", at])


def diagnosed(workspace: Workspace) -> None:
    """Let value stages write a diagnosis from now on."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / "diagnosis.json").write_text(diagnosis().model_dump_json())


def run_all(workspace: Workspace, recipe: Path, *overrides: str, until: str | None = None) -> str:
    with orchestrated(workspace, recipe, *overrides, in_process=True) as orchestrator:
        attempt_all(orchestrator, until=until)
        if until is None:
            orchestrator.run.update(status=orchestrator.run.outcome())
        orchestrator.ledger.close()  # what is sent in the background would change a workspace that is copied
        return orchestrator.run.record.run_id


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, ledger_database: str) -> Path:
    """Return a workspace in which the recipe has run."""
    folder = tmp_path_factory.mktemp("once")
    (folder / "fake.yaml").write_text(RECIPE)
    workspace = Workspace(folder / "workspace")
    diagnosed(workspace)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", ledger_database)
        run_all(workspace, folder / "fake.yaml")
    return workspace.root


@pytest.fixture
def finished(once: Path, workspace: Workspace) -> Workspace:
    """Return a copy of the workspace, which a test may damage."""
    shutil.copytree(once, workspace.root)
    return workspace


def test_tables_first_and_what_to_do_last(finished: Workspace) -> None:
    done = shown(finished, "latest")
    assert done.exit_code == 0, done.stderr
    assert "400 responses to 100 test prompts" in done.stdout
    assert "Good: the whole interval is above 0." in done.stdout
    *_, last = done.stdout.strip().splitlines()
    # 0.6 − 0.05 a step over 12 steps: the first three have 0.55 on average, the last three 0.1
    assert last.startswith("policy: Explained variance falls from 0.55 to 0.10: the critic does not keep up")
    assert "value: Use it" in done.stdout
    headings, _, first, *_ = done.stdout.partition("above 0.\n")[2].strip("\n").splitlines()[1:]
    assert re.split(" {2,}", headings.strip()) == ["explained variance", "95 % interval", "prompts"]
    assert re.split(" {2,}", first.strip()) == ["all tokens", "0.60", "0.58 to 0.62", "100"]
    ends = [headings.index("variance") + 8, headings.index("prompts") + 7]
    assert ends == [first.index("0.60") + 4, first.index("100") + 3], "numbers end below their headings"


def test_one_stage_alone(finished: Workspace) -> None:
    """``RUN/STAGE`` shows the critic of this stage alone."""
    value = shown(finished, "1/value").stdout
    assert "policy" not in value.replace("the policy", "")
    assert value.strip().splitlines()[-1].startswith("value: Use it")
    policy = shown(finished, "1/policy").stdout
    assert "Over the iterations" in policy and "test prompts" not in policy


def test_a_program_gets_everything(finished: Workspace) -> None:
    told = json.loads(shown(finished, "latest", "--json").stdout)
    [value], [policy] = told["pretrained"], told["drifts"]
    assert value["diagnosis"] == diagnosis().model_dump(mode="json")
    assert [each["rule"] for each in value["advice"]] == ["usable"]
    assert [point["iteration"] for point in policy["points"]] == list(range(1, 13))
    assert policy["points"][0]["explained_variance"] == pytest.approx(0.6)
    assert policy["points"][0]["value_loss"] is None
    assert told["missing"] == []


@pytest.mark.slow
def test_the_answer_loads_no_framework(finished: Workspace) -> None:
    code = (
        "import sys\n"
        "from vantage.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'prefect', 'mlflow', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "critic", "latest", "--workspace", str(finished.root)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_page(finished: Workspace, tmp_path: Path) -> None:
    """``--html`` writes a page with the plots of both critics."""
    page = tmp_path / "critic.html"
    done = shown(finished, "latest", "--html", str(page))
    assert str(page) in done.stdout
    text = page.read_text()
    assert text.count("<svg") == 7 + 3
    assert "value: the pretrained critic" in text and "policy: the critic during" in text


def test_a_page_that_cannot_be_written_is_said(finished: Workspace, tmp_path: Path) -> None:
    done = shown(finished, "latest", "--html", str(tmp_path / "nowhere" / "critic.html"))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "nowhere" in done.stderr and "Traceback" not in done.stderr


def test_reused_stages_have_the_curves_of_the_run_that_made_them(
    finished: Workspace, recipe_file: Path
) -> None:
    run_all(finished, recipe_file)
    assert len(read_runs(finished)) == 2
    first, second = (json.loads(shown(finished, number, "--json").stdout) for number in ("1", "2"))
    assert second["run_id"] != first["run_id"]
    assert second["drifts"] == first["drifts"] and second["pretrained"] == first["pretrained"]


def test_an_artifact_of_an_earlier_version_names_the_remedy(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file)
    done = shown(workspace, "latest/value")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert (
        "value was made by a version that did not diagnose critics; run the same recipe again" in done.stderr
    )
    both = shown(workspace, "latest")
    assert both.exit_code == 0
    assert "did not diagnose critics" in both.stdout and "Over the iterations" in both.stdout


def test_a_diagnosis_of_a_later_version_is_said(workspace: Workspace, recipe_file: Path) -> None:
    diagnosed(workspace)
    path = workspace.root / "diagnosis.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    run_all(workspace, recipe_file)
    assert "written by another version" in shown(workspace, "latest/value").stderr


def test_a_damaged_diagnosis_is_no_diagnosis(finished: Workspace) -> None:
    digest = read_runs(finished)[0].stages["value"].digest
    file = finished.store / "objects" / str(digest) / "diagnosis.json"
    file.chmod(0o644)
    file.write_text(file.read_text().replace("0.6", "0.7"))
    done = shown(finished, "latest/value")
    assert done.exit_code == ExitCode.STORAGE
    assert "sha256" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("line", [b"{\n", b'{"operation": "log_metrics", "stage": "policy", "rows": 7}\n'])
def test_a_damaged_outbox_is_said(finished: Workspace, line: bytes) -> None:
    [record] = read_runs(finished)
    with (finished.folder(record.run_id) / "ledger" / "outbox.jsonl").open("ab") as outbox:
        outbox.write(line)
    done = shown(finished, "latest/policy")
    assert done.exit_code == ExitCode.STORAGE
    assert "outbox.jsonl" in done.stderr and "MLflow" in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_is_not_so_far(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file, until="value")
    done = shown(workspace, "latest")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "value is waiting, and its critic is diagnosed at its end" in done.stderr
    assert "policy is waiting and has no iteration yet" in done.stderr


def test_a_running_policy_shows_its_journal(workspace: Workspace, recipe_file: Path) -> None:
    """The page also shows iterations that no checkpoint and no ledger has yet."""
    diagnosed(workspace)
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="policy")
        key = "5" * 64
        orchestrator.run.update_stage("policy", status="running", stage_key=key)
        journal = Journal(workspace.storage.scratch_folder(key) / JOURNAL)
        for iteration, explained in ((1, 0.5), (2, float("nan")), (3, 0.4)):
            journal.append(iteration, {"explained_variance": explained}, time=1.0)
        told = json.loads(shown(workspace, "latest/policy", "--json").stdout)
    [policy] = told["drifts"]
    assert policy["is_running"]
    assert [point["explained_variance"] for point in policy["points"]] == [0.5, None, 0.4]


def test_curves_that_are_gone_are_said(finished: Workspace) -> None:
    [record] = read_runs(finished)
    finished.records.remove_files(record.run_id)
    done = shown(finished, "latest/policy")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "look for them in MLflow" in done.stderr


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("7", "there is no run 7"),
        ("../etc", "is not one of Vantage's"),
        ("latest/nobody", "nobody is no stage of run"),
        ("latest/sft", "sft (sft) is no stage of run"),
    ],
)
def test_a_wrong_name_is_refused(named: str, said: str, finished: Workspace) -> None:
    done = shown(finished, named)
    assert done.exit_code == ExitCode.BAD_INPUT
    assert said in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_recipe_without_a_critic(workspace: Workspace, recipe_file: Path) -> None:
    text = recipe_file.read_text()
    start, end = text.index("  value:\n"), text.index("  policy:\n")
    text = text[:start] + text[end:]
    text = text.replace("{preset: vapo, length_adaptive_alpha: 1.0}", "grpo").replace(
        "    critic: value\n", ""
    )
    recipe_file.write_text(text)
    run_all(workspace, recipe_file)
    done = shown(workspace, "latest")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "has no critic" in done.stderr


@pytest.mark.slow
def test_in_a_bucket_from_another_machine(
    bucket: str, recipe_file: Path, tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "here"))
    here = Workspace.at(bucket)
    run_all(here, recipe_file)
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "there"))
    told = json.loads(shown(bucket, "latest", "--json").stdout)
    assert len(told["drifts"][0]["points"]) == 12
    assert "did not diagnose" in told["missing"][0]
