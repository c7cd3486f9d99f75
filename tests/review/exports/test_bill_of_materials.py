"""``vantage sbom`` prints what was recorded, valid by CycloneDX's own schema."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from typer.testing import CliRunner

from tests.review.diff.small_runs import PROVENANCE, environment, make_run, write_recipe
from vantage.attempts.identity.environment import environment as present_environment
from vantage.cli.main import app
from vantage.review.exports.bill_of_materials import Material, bill_of_materials
from vantage.runs.record import RunRecord
from vantage.runs.workspace import Workspace
from vantage.schemas.records.environment import Environment, Installed

MADE = Material("r/sft", "policy", "a" * 64, frozenset({"b" * 64, "c" * 64}), {"stage_key": "d" * 64})
DATA = Material("r/data.d", "dataset", "b" * 64, frozenset())
MODEL = Material("r/model", "policy", "c" * 64, frozenset())


def problems(text: str) -> object:
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def test_the_whole_environment_of_this_process_makes_a_valid_bill() -> None:
    text = bill_of_materials(MADE, [DATA, MODEL], present_environment())
    assert problems(text) is None
    libraries = [each for each in json.loads(text)["components"] if each["type"] == "library"]
    assert {(each["name"], each["version"]) for each in libraries} == {
        (each.name, each.version) for each in present_environment().installed
    }


def test_the_validator_finds_what_is_wrong() -> None:
    told = json.loads(bill_of_materials(MADE, [], environment(torch="1")))
    told["components"][0]["type"] = "nonsense"
    assert problems(json.dumps(told)) is not None


def test_the_artifact_its_inputs_and_what_depends_on_what() -> None:
    told = json.loads(bill_of_materials(MADE, [DATA, MODEL], environment(torch="2.13.0+cpu")))
    subject = told["metadata"]["component"]
    assert (subject["type"], subject["name"]) == ("machine-learning-model", "r/sft")
    assert subject["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert {"name": "vantage:stage_key", "value": "d" * 64} in subject["properties"]
    of = {each["name"]: each for each in told["components"]}
    assert (of["r/data.d"]["type"], of["r/model"]["type"]) == ("data", "machine-learning-model")
    assert of["torch"]["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert (of["CPython"]["type"], of["Debian 12, x86_64"]["type"]) == ("platform", "operating-system")
    depends = {each["ref"]: set(each.get("dependsOn", ())) for each in told["dependencies"]}
    assert depends[subject["bom-ref"]] == {each["bom-ref"] for each in told["components"]}


@pytest.mark.parametrize(
    "said, expected",
    [
        ("MIT", {"license": {"id": "MIT"}}),
        ("MIT OR Apache-2.0", {"expression": "MIT OR Apache-2.0"}),
        ("Apache License, Version 2.0", {"license": {"name": "Apache License, Version 2.0"}}),
    ],
)
def test_licences(said: str, expected: dict[str, Any]) -> None:
    """A licence in a distribution's metadata becomes a valid licence of CycloneDX."""
    one = Environment(
        python="3.11", implementation="CPython", system="s", machine="m", installed=(Installed(name="n", version="1", license=said),)
    )  # fmt: skip
    text = bill_of_materials(MADE, [], one)
    (library,) = [each for each in json.loads(text)["components"] if each["type"] == "library"]
    assert library["licenses"] == [expected]
    assert problems(text) is None


def test_the_same_artifact_has_the_same_bill_and_another_one_another_number() -> None:
    bills = [
        bill_of_materials(MADE, inputs, environment(torch="1")) for inputs in ([DATA, MODEL], [MODEL, DATA])
    ]
    assert bills[0] == bills[1]
    assert "timestamp" not in bills[0]
    other = bill_of_materials(MADE, [DATA, MODEL], environment(torch="2"))
    assert json.loads(other)["serialNumber"] != json.loads(bills[0])["serialNumber"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workspace, RunRecord]]:
    folder = tmp_path_factory.mktemp("bill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/nothing.db")
        workspace = Workspace(folder / "workspace")
        yield (
            workspace,
            make_run(workspace, write_recipe(folder, range(9)), installed=environment(torch="2.13.0")),
        )


def bill(workspace: Workspace, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["sbom", *arguments, "--workspace", workspace.address])


def test_a_run_names_its_policy_and_a_stage_anything(
    made: tuple[Workspace, RunRecord], tmp_path: Path
) -> None:
    workspace, record = made
    whole, stage = bill(workspace, "latest"), bill(workspace, f"{record.run_id}/sft")
    assert (whole.exit_code, whole.stdout) == (0, stage.stdout)
    assert problems(whole.stdout) is None
    told = json.loads(whole.stdout)
    assert told["metadata"]["component"]["hashes"][0]["content"] == record.stages["sft"].digest
    materials = {each["name"] for each in told["components"] if each["type"] != "library"}
    assert {"compared/model", "compared/data.demonstrations"} <= materials
    assert not {"compared/evaluation", "compared/data.prompts"} & materials, "it was not made of these"
    written = bill(workspace, "latest/data.prompts", "--to", str(tmp_path / "bill.json"))
    assert written.exit_code == 0
    assert json.loads((tmp_path / "bill.json").read_text())["metadata"]["component"]["type"] == "data"


def test_what_was_read_at_any_depth_is_in_it_with_its_licence(tmp_path: Path) -> None:
    """The evaluation reads no demonstrations itself: the model that it judged was made of them."""
    workspace = Workspace(tmp_path / "workspace")
    licences = "licenses={data.demonstrations: CC-BY-4.0, sft: MIT}"
    make_run(workspace, write_recipe(tmp_path, range(7)), licences, installed=environment(torch="2.13.0"))
    told = json.loads(bill(workspace, "latest/evaluation").stdout)
    materials = {each["name"]: each for each in told["components"] if each["name"].startswith("compared/")}
    assert set(materials) == {
        f"compared/{step}" for step in ("model", "data.demonstrations", "data.prompts", "sft")
    }
    licences_of = {name: each.get("licenses") for name, each in materials.items()}
    assert licences_of["compared/sft"] == [{"license": {"id": "MIT"}}]
    assert licences_of["compared/data.demonstrations"] == [{"license": {"id": "CC-BY-4.0"}}]
    assert licences_of["compared/data.prompts"] is None


def test_it_describes_the_artifact_and_not_the_run_that_asks(tmp_path: Path) -> None:
    """A second recipe, under another name and with another name for the stage, reuses what the first one made."""
    workspace = Workspace(tmp_path / "workspace")
    first = make_run(workspace, write_recipe(tmp_path, range(8)), installed=environment(torch="2.13.0"))
    other = tmp_path / "other.yaml"
    other.write_text(
        (tmp_path / "compared.yaml").read_text().replace("recipe: compared", "recipe: other").replace("sft", "tuned")
        .replace("kind: tuned", "kind: sft")
    )  # fmt: skip
    second = make_run(workspace, other, installed=environment(torch="2.99.0"))
    assert second.stages["tuned"].digest == first.stages["sft"].digest
    bills = [bill(workspace, f"{first.run_id}/sft").stdout, bill(workspace, f"{second.run_id}/tuned").stdout]
    assert bills[0] == bills[1]
    assert '"compared/sft"' in bills[0]
    assert "other/" not in bills[0]
    assert "2.13.0" in bills[0]
    assert "2.99.0" not in bills[0], "it was made before"


def test_the_newest_licence_is_everybodys(tmp_path: Path) -> None:
    """A licence that was added or corrected later also holds for what was made before."""
    workspace, recipe = Workspace(tmp_path / "workspace"), write_recipe(tmp_path, range(6))
    first = make_run(workspace, recipe, "licenses={sft: MIT}", installed=environment(torch="2.13.0"))
    second = make_run(workspace, recipe, "licenses={sft: Apache-2.0, data.demonstrations: CC-BY-4.0}")
    make_run(workspace, recipe, "seed=3")  # the package names no licence
    told = [json.loads(bill(workspace, f"{each.run_id}/sft").stdout) for each in (first, second)]
    assert told[0] == told[1]
    assert told[0]["metadata"]["component"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    data = {each["name"]: each for each in told[0]["components"]}["compared/data.demonstrations"]
    assert data["licenses"] == [{"license": {"id": "CC-BY-4.0"}}]


@pytest.mark.parametrize(
    "named, message",
    [
        ("quickstart", "quickstart is a recipe, not a result of a run"),
        ("latest/nope", "has no stage nope"),
        ("gone", "gone is no run and no registered model of MLflow"),
    ],
)
def test_what_has_no_bill_is_told(made: tuple[Workspace, RunRecord], named: str, message: str) -> None:
    result = bill(made[0], named)
    assert (result.exit_code, message in result.stderr, result.stdout) == (65, True, "")


def test_an_artifact_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "workspace")
    make_run(workspace, write_recipe(tmp_path, range(9)), provenance=PROVENANCE)
    result = bill(workspace, "1/sft")
    assert result.exit_code == 65
    assert "what was installed where it was made is not recorded" in result.stderr
