"""The Python interface does what the commands do: it is compared with the commands' own output and records."""

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import vantage
from tests.support.fixtures import ROOT
from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import events, pace
from tests.support.real_runs import wait_for
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.runs.run import read_runs
from vantage.runs.view import RunView
from vantage.runs.workspace import Workspace

FAKE = (sys.executable, "-m", "tests.support.fake_vantage")


@pytest.fixture
def fake_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let runs compute with fake stages, in processes that are forked."""
    monkeypatch.setattr("vantage.api.running.COMMAND", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with WITH_PREFECT.children():
        yield


def printed(*arguments: object) -> Any:
    """Return what a command prints as JSON."""
    from typer.testing import CliRunner

    return json.loads(CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout)


def test_the_package_has_the_names_that_its_stub_has_and_imports_nothing_before() -> None:
    stub = ast.parse((ROOT / "vantage" / "__init__.pyi").read_text())
    assert sorted(vantage.__all__) == sorted(
        alias.asname or alias.name
        for line in stub.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    )
    for name in vantage.__all__:
        assert callable(getattr(vantage, name))
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        vantage.runn  # type: ignore[attr-defined]  # noqa: B018
    loaded = "import sys, vantage; print([name for name in sys.modules if name.startswith('vantage.')])"
    done = subprocess.run(
        [sys.executable, "-c", loaded],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url", "fake_stages")
def test_a_run_is_that_of_the_command_and_the_next_reuses_it(
    workspace: Workspace, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = vantage.plan(recipe_file, workspace=workspace.root)
    assert (
        json.loads(json.dumps([step.as_json() for step in planned.steps]))
        == printed("plan", recipe_file, "--workspace", workspace.root)["steps"]
    )
    assert set(planned.frame().action) == {"run", "wait"}

    run = vantage.run(recipe_file, set={"stages.sft.epochs": 2}, workspace=workspace.root)
    assert "sft" in capsys.readouterr().out, "its progress is printed here"
    [record] = read_runs(workspace)
    assert (run.id, run.status, run.record) == (record.run_id, "completed", record)
    assert run.record.overrides == ("stages.sft.epochs=2",)
    assert run.stage("value").metrics == {"explained_variance": 0.4}
    assert run.stage("value").artifact.digest == record.stages["value"].digest
    history = RunView(workspace, run.id).history
    recorded = [(step, value) for step, _, value in history.curves["sft"]["loss"]]  # type: ignore[union-attr]
    assert recorded
    assert list(run.stage("sft").curve("loss").items()) == recorded
    with pytest.raises(KeyError, match="no curve 'los'; it has"):
        run.stage("sft").curve("los")
    with pytest.raises(KeyError, match="no stage 'polic'; it has"):
        run.stage("polic")

    again = vantage.run(str(recipe_file), set={"stages.sft.epochs": 2}, workspace=str(workspace.root))
    assert again.id != run.id
    assert {stage.status for stage in again.stages.values()} == {"reused"}
    assert again.stage("sft").curve("loss").equals(run.stage("sft").curve("loss")), (
        "those of the run that computed it"
    )
    assert vantage.open_run(workspace=workspace.root).id == again.id
    assert vantage.open_run("1", workspace=workspace.root).id == run.id

    page = run.report(tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert run.id in page.read_text()
    audited = vantage.audit(run.id, workspace=workspace.root)
    shown = printed("audit", run.id, "--workspace", workspace.root)
    assert audited.outcome == shown["outcome"] == "ok"
    assert audited.roots == tuple(shown["roots"])


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url", "fake_stages")
def test_a_failed_stage_is_an_error_that_has_the_run(workspace: Workspace, recipe_file: Path) -> None:
    workspace.root.mkdir(parents=True)
    (workspace.root / "refuse.txt").write_text("reward")
    with pytest.raises(vantage.RunFailed) as failed:
        vantage.run(recipe_file, workspace=workspace.root)
    assert failed.value.exit_code == ExitCode.BAD_INPUT
    assert failed.value.run is not None
    assert failed.value.run.status == "failed"
    assert failed.value.run.stage("reward").status == "failed"
    assert str(failed.value.run.stage("reward").record.reason) in str(failed.value)


def test_what_is_refused_starts_nothing(workspace: Workspace, recipe_file: Path) -> None:
    with pytest.raises(ValueError, match="stages.sft.epoch"):
        vantage.run(recipe_file, set={"stages.sft.epoch": 2}, workspace=workspace.root)
    with pytest.raises(TypeError, match=r"set\['seed'\] is <object"):
        vantage.run(recipe_file, set={"seed": object()}, workspace=workspace.root)
    with pytest.raises(TypeError, match="is nan, which is no"):
        vantage.plan(recipe_file, set={"stages.sft.learning_rate": float("nan")}, workspace=workspace.root)
    assert not workspace.root.exists()
    with pytest.raises(ValueError, match="no run"):
        vantage.open_run(workspace=workspace.root)


INTERRUPTED = """
import sys, vantage
import vantage.api.running as running
running.COMMAND = (sys.executable, "-m", "tests.support.fake_vantage")
try:
    vantage.run(sys.argv[1], workspace=sys.argv[2])
except KeyboardInterrupt as interrupt:
    print("interrupted:", interrupt)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_an_interrupt_saves_and_the_same_call_goes_on(workspace: Workspace, recipe_file: Path) -> None:
    pace(workspace, 5.0)
    process = WITH_PREFECT.popen(
        [sys.executable, "-c", INTERRUPTED, str(recipe_file), str(workspace.root)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: any(line.startswith("sft") for line in events(workspace)))
        os.killpg(process.pid, signal.SIGINT)  # as a notebook's button and a terminal do
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    [record] = read_runs(workspace)
    assert (record.status, record.stages["sft"].status) == ("resumable", "resumable")
    assert f"interrupted: run {record.run_id} is resumable" in said


def test_a_policy_is_the_model_that_its_folder_holds(small_lora_run: Workspace, tmp_path: Path) -> None:
    policy = vantage.load_policy("latest/sft", workspace=small_lora_run.root)
    printed("export", "latest/sft", tmp_path / "exported", "--workspace", small_lora_run.root)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = tokenizer("say it 3", return_tensors="pt").input_ids
    assert policy.tokenizer("say it 3").input_ids == ids[0].tolist()
    assert (policy.model(ids).logits - exported(ids).logits).abs().max() < 1e-5
    assert policy.generation.temperature == 0.8
    with pytest.raises(ValueError, match="a reward model"):
        vantage.load_policy("latest/reward", workspace=small_lora_run.root)
