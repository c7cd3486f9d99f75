"""A recipe goes on from another run's policy: real stages at reduced size, audited back to the first run's data."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.cli.main import app
from vantage.models.folders import load_policy
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.artifacts import is_same
from vantage.schemas.records.attempt import RUN_STAGE

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.usefixtures("model_threads")]

FIRST = """\
recipe: first
seed: 3
model: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 48, max_response_tokens: 8}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 64}
stages:
  sft: {kind: sft, data: demonstrations, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
"""
SECOND = """\
recipe: second
seed: 4
model: {source: "latest/sft"}
models:
  before: {source: "1/model"}
generation: {max_prompt_tokens: 48, max_response_tokens: 8}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 64}
  prompts: {source: "builtin:arithmetic/prompts", rows: 32, split: {validation: 8, test: 8}}
stages:
  further: {kind: sft, data: demonstrations, epochs: 0.5, batch_size: 8}
  evaluation:
    {kind: evaluation, candidate: further, baseline: before, judge: {verifier: arithmetic}, prompts: prompts}
"""


def run_it(workspace: Workspace, recipe: Path, *overrides: str) -> RunRecord:
    with orchestrated(
        workspace, recipe, *overrides, stage_function=RUN_STAGE, makes_report=False, in_process=True
    ) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
        return orchestrator.run.record


class Chain:
    """Two runs, the second of which goes on from the first one's policy."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder / "workspace")
        (folder / "first.yaml").write_text(FIRST)
        self.recipe = folder / "second.yaml"
        self.recipe.write_text(SECOND)
        self.first = run_it(self.workspace, folder / "first.yaml")
        self.second = run_it(self.workspace, self.recipe, "stages.further.learning_rate=1e-3")

    def call(self, *words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--workspace", self.workspace.address])


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Chain(tmp_path_factory.mktemp("chain"))


def test_the_imported_model_is_the_other_run_s_and_names_it_as_its_parent(chain: Chain) -> None:
    assert {chain.first.status, chain.second.status} == {"completed"}
    storage = chain.workspace.storage
    imported = storage.find(str(chain.second.stages["model"].stage_key))
    made = storage.find(str(chain.first.stages["sft"].stage_key))
    assert imported is not None and made is not None
    assert imported.artifact.parents == {"source": made.artifact.digest}
    assert is_same(imported.artifact, made.artifact), "the same files"
    trained = storage.find(str(chain.second.stages["further"].stage_key))
    assert trained is not None
    weights = [load_policy(storage.folder(each.artifact)).state_dict() for each in (made, trained)]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0]), "and trained further"


def test_an_audit_goes_back_to_the_data_of_the_first_run(chain: Chain) -> None:
    done = chain.call("audit", f"{chain.second.run_id}/further", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    of = {each["id"]: each for each in told["artifacts"]}
    steps = {(each["run_id"], each["step"]) for each in of.values()}
    assert {(chain.first.run_id, step) for step in ("sft", "model", "data.demonstrations")} < steps
    model = next(
        each for each in of.values() if (each["run_id"], each["step"]) == (chain.second.run_id, "model")
    )
    [edge] = model["parents"]
    assert (edge["role"], of[edge["parent"]]["step"]) == ("source", "sft")
    assert edge["digest"] == chain.first.stages["sft"].digest


def test_an_audit_finds_a_run_that_names_another_source(chain: Chain, tmp_path: Path) -> None:
    copied = tmp_path / "workspace"
    shutil.copytree(chain.workspace.root, copied)
    record = copied / "runs" / chain.second.run_id / "run.json"
    digest = str(chain.first.stages["sft"].digest)
    record.write_text(record.read_text().replace(f"/sft#{digest}", f"/sft#{'0' * 64}"))
    done = CliRunner().invoke(app, ["audit", f"{chain.second.run_id}/further", "--workspace", str(copied)])
    assert done.exit_code == 1
    assert "by run.json 0001-first" in " ".join(done.output.split())


def test_a_bill_of_materials_has_what_the_first_run_was_made_of(chain: Chain) -> None:
    done = chain.call("sbom", f"{chain.second.run_id}/further")
    assert done.exit_code == 0, done.output
    names = {each["name"] for each in json.loads(done.stdout)["components"]}
    assert {"first/sft", "first/model", "first/data.demonstrations", "second/model"} <= names


def test_an_exported_card_names_the_stage(chain: Chain, tmp_path: Path) -> None:
    assert chain.call("export", f"{chain.second.run_id}/model", str(tmp_path / "out")).exit_code == 0
    digest = str(chain.first.stages["sft"].digest)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| source | policy | run:{chain.first.run_id}/sft | `{digest[:16]}` |" in card


def test_what_the_second_run_needs_of_the_first_is_kept(chain: Chain, tmp_path: Path) -> None:
    copied = tmp_path / "workspace"
    shutil.copytree(chain.workspace.root, copied)
    place = Workspace(copied)
    # the second run alone is kept: both recipes have one run, so the first is removed by hand
    record = next(each for each in read_runs(place) if each.run_id == chain.first.run_id)
    place.records.write(record.model_copy(update={"status": "removed", "used_keys": {}}))
    done = CliRunner().invoke(app, ["gc", "--workspace", str(copied)])
    assert done.exit_code == 0, done.output
    for step in ("sft", "model", "data.demonstrations"):
        assert place.storage.has_object(str(chain.first.stages[step].digest)), step


def test_rates_that_are_left_open_follow_the_width_of_the_other_run_s_model(chain: Chain) -> None:
    ours, _ = load_resolved(chain.recipe, ["model.source=1/sft"], workspace=chain.workspace)
    builtin, _ = load_resolved(chain.recipe, ["model.source=builtin:tiny"])
    assert ours.stages["further"] == builtin.stages["further"], "the same width"
