"""Each command takes the names that it documents, refuses the others, and takes the spelling that its refusal gives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.review.diff.small_runs import environment, make_run, write_recipe
from tests.support.every import every
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.ledger import tracking
from vantage.ledger.to_mlflow import published_models
from vantage.ledger.to_mlflow.published_models import NoSuchModel, PublishedVersion
from vantage.runs.record import RunRecord
from vantage.runs.workspace import Workspace


class Place:
    """A folder to work in, with a workspace of two runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workspace = Workspace(folder / "workspace")
        recipe = write_recipe(folder, range(9))
        installed = environment(torch="2.13.0")
        self.first = make_run(self.workspace, recipe, installed=installed)
        self.last = make_run(self.workspace, recipe, "stages.sft.learning_rate=0.5", installed=installed)

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--workspace", self.workspace.address])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("names"))


@pytest.fixture
def vantage(made: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a function that runs commands in a folder that has a folder ``latest``; MLflow has no database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    (tmp_path / "latest").mkdir()
    return made


@pytest.fixture
def published(vantage: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let MLflow show the first run's policy under the name of a built-in recipe, and return the name."""
    stage = vantage.first.stages["sft"]

    def find_version(address: str, name: str, *, version: str | None, alias: str | None) -> PublishedVersion:
        if name != "quickstart" or version not in (None, "1") or alias not in (None, "champion"):
            raise NoSuchModel(f"MLflow has no registered model {name}")
        return PublishedVersion(
            "quickstart",
            "1",
            "",
            str(stage.digest),
            "sft",
            str(stage.stage_key),
            vantage.first.run_id,
            {},
            {},
        )

    monkeypatch.setattr(published_models, "find_version", find_version)
    monkeypatch.setattr(tracking, "is_missing_database", lambda address: False)
    return "quickstart"


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ids of the runs that ``resume`` and ``publish`` would have worked on."""
    run_ids: list[str] = []

    def execute(run: Any, *_: object, **__: object) -> RunRecord:
        run_ids.append(run.record.run_id)
        record: RunRecord = run.record
        return record

    def publish_again(place: Workspace, run_id: str, *_: object, **__: object) -> dict[str, str]:
        run_ids.append(run_id)
        return {"small": "published"}

    monkeypatch.setattr("vantage.flows.execution.execute", execute)
    monkeypatch.setattr("vantage.flows.publishing.moving_aliases.publish_again", publish_again)
    return run_ids


OF_RUNS: dict[str, Callable[[str], list[str]]] = {
    "status": lambda named: ["status", named],
    "logs": lambda named: ["logs", named],
    "cancel": lambda named: ["cancel", named],
    "report": lambda named: ["report", named],
    "resume": lambda named: ["resume", named],
    "publish": lambda named: ["publish", named],
    "approve": lambda named: ["approve", named, "sft", "--reason", "good"],
    "reject": lambda named: ["reject", named, "sft", "--reason", "bad"],
    "critic": lambda named: ["critic", named],
}


@pytest.mark.parametrize("command", OF_RUNS)
def test_commands_of_runs_take_the_run_beside_a_folder_of_its_name(
    command: str, vantage: Place, done: list[str]
) -> None:
    """Each command does the same for ``latest`` as for ``run:latest``, and something else for another run."""
    shown = [vantage(*OF_RUNS[command](named)) for named in ("latest", "run:latest", "run:1")]
    told = [each.output + " ".join(done[number : number + 1]) for number, each in enumerate(shown)]
    assert [each.exit_code for each in shown] == [shown[0].exit_code] * 3
    assert told[0] == told[1]
    if command != "logs":  # the stages of these runs have printed no logs
        assert (vantage.last.run_id in told[0], vantage.first.run_id in told[2]) == (True, True), told
        assert vantage.last.run_id not in told[2]


@every("command", OF_RUNS)
@every(
    "named, said",
    [
        ("000", "000 fits 0001-compared-"),
        ("quickstart", "run 'quickstart' is not one of Vantage's: quickstart is a recipe"),
        ("recipe:quickstart", "is not one of Vantage's: recipe:quickstart is a recipe"),
        ("folder:latest", "is not one of Vantage's: folder:latest is a folder"),
        ("registered:small", "is not one of Vantage's: registered:small is a registered model"),
        ("latest/model", "is not one of Vantage's: latest/model is model of run 0002-compared-"),
        ("nothing", "there is no run nothing"),
    ],
)
def test_commands_of_runs_refuse_all_else(
    command: str, named: str, said: str, vantage: Place, done: list[str]
) -> None:
    result = vantage(*OF_RUNS[command](named))
    assert (result.exit_code, result.stdout, done) == (ExitCode.BAD_INPUT, "", [])
    assert said in result.stderr
    accepted = "RUN or RUN/STAGE" if command == "critic" else "RUN"
    if "is not one of" in said:
        assert f"{command}` accepts {accepted} (" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_diff_between_a_recipe_and_a_registered_model_of_its_name(vantage: Place, published: str) -> None:
    refused = vantage("diff", "1", published)
    assert (refused.exit_code, refused.stdout) == (ExitCode.BAD_INPUT, "")
    assert (
        "quickstart means a recipe and a registered model; write recipe:quickstart or registered:quickstart"
    ) in refused.stderr
    model = json.loads(vantage("diff", "run:1/sft", "registered:quickstart", "--json").stdout)
    assert (model["is_same"], model["b"]["kind"], model["b"]["run_id"]) == (
        True,
        "model",
        vantage.first.run_id,
    )
    recipe = json.loads(vantage("diff", "latest", "recipe:quickstart", "--json").stdout)
    assert (recipe["a"]["run_id"], recipe["b"]["kind"]) == (vantage.last.run_id, "recipe")


@pytest.mark.parametrize(
    "named", ["quickstart", "registered:quickstart", "quickstart/1", "quickstart@champion"]
)
def test_sbom_takes_a_registered_model_that_is_called_as_a_recipe(
    named: str, vantage: Place, published: str
) -> None:
    """``sbom`` takes the registered model, as ``audit`` does, since a recipe has no bill of materials."""
    result = vantage("sbom", named)
    assert result.exit_code == 0
    told = json.loads(result.stdout)["metadata"]["component"]
    assert told["hashes"][0]["content"] == vantage.first.stages["sft"].digest
    refused = vantage("sbom", "recipe:quickstart")
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "sbom` accepts RUN, RUN/STAGE, RUN/model, or NAME, NAME@ALIAS or NAME/VERSION" in refused.stderr


def test_sbom_takes_the_run_beside_a_folder_of_its_name(vantage: Place) -> None:
    plain, prefixed = vantage("sbom", "latest"), vantage("sbom", "run:latest/sft")
    assert (plain.exit_code, plain.stdout) == (0, prefixed.stdout)
    refused = vantage("sbom", "folder:latest")
    assert (refused.exit_code, "folder:latest is a folder" in refused.stderr) == (ExitCode.BAD_INPUT, True)


@pytest.mark.parametrize("command", ["run", "plan", "estimate", "deploy"])
def test_commands_of_recipes_refuse_other_prefixes(command: str) -> None:
    refused = CliRunner().invoke(app, [command, "run:latest"])
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "run:latest names no recipe; " in refused.stderr
    assert f"{command}` accepts a recipe's file or name" in refused.stderr


def test_commands_of_recipes_take_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VANTAGE_WORKSPACE", str(tmp_path / "workspace"))
    write_recipe(tmp_path, range(9)).rename(tmp_path / "plain")
    for named in ("plain", "recipe:plain"):
        planned = CliRunner().invoke(app, ["plan", named, "--json"])
        assert planned.exit_code == 0, planned.output
        assert json.loads(planned.stdout)["recipe"] == "compared"
        estimated = CliRunner().invoke(app, ["estimate", named, "--gpu", "h100", "--json"])
        assert estimated.exit_code == 0, estimated.output


def test_rollback_takes_an_alias_alone(vantage: Place) -> None:
    for named in ("quickstart", "registered:quickstart/3"):
        refused = vantage("rollback", named, "--reason", "worse")
        assert (refused.exit_code, "is not MODEL@ALIAS" in refused.stderr) == (ExitCode.BAD_INPUT, True)
