"""A verdict compares a policy with a registered model of a real MLflow; the stages are real but small."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from mlflow import MlflowClient
from rich.console import Console
from typer.testing import CliRunner

from tests.ledger.small_run import artifact
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.flows.publishing.publishing import publish
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.to_mlflow.published_models import RegistryUnavailable, find_version
from vantage.models.folders import load_policy, load_tokenizer
from vantage.runs.pinning import pinned
from vantage.runs.plan_table import show_plan
from vantage.runs.planning import plan, plan_warnings
from vantage.runs.record import RunRecord
from vantage.runs.registered_models import fetch_registered
from vantage.runs.resolving import load_resolved
from vantage.runs.run import next_run, read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.sources import Registered
from vantage.schemas.records.artifacts import PolicyCheckpoint, RewardModel, StoredModel, is_same
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import headline_metric_names
from vantage.storage.sealed_folders import read_manifest, seal

pytestmark = pytest.mark.timeout(600)

RECIPE = """\
recipe: challenger
seed: 3
model: {source: "builtin:tiny"}
models:
  champion: {source: "models:/judged@champion", otherwise: model}
  grader: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 48, max_response_tokens: 8}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 64}
  prompts: {source: "builtin:arithmetic/prompts", rows: 32, split: {validation: 8, test: 8}}
stages:
  sft: {kind: sft, data: demonstrations, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
  evaluation:
    kind: evaluation
    candidate: sft
    baseline: champion
    judge: {verifier: arithmetic}
    also: {model: grader}
    prompts: prompts
    gate: {metric: accuracy_gain, at_least: -1.0}
publish:
  - {stage: sft, registered_model: judged, alias: champion, after: evaluation}
"""


def run_it(workspace: Workspace, recipe: Path, *overrides: str, until: str | None = None) -> RunRecord:
    """Run up to and without the step ``until``, as if the process had died there."""
    with orchestrated(
        workspace, recipe, *overrides, stage_function=RUN_STAGE, in_process=True
    ) as orchestrator:
        attempt_all(orchestrator, until=until)
        if until is None:
            for publication in orchestrator.recipe.publish:
                publish(publication, orchestrator)
            orchestrator.end()
        return orchestrator.run.record


class Life:
    """What the tests read: three runs, one of which was resumed after the alias had moved."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder / "workspace")
        self.recipe = folder / "challenger.yaml"
        self.recipe.write_text(RECIPE)
        self.address = f"sqlite:///{self.workspace.root / 'mlflow.db'}"
        plain, _ = load_resolved(self.recipe)
        self.planned_first = next_run(self.workspace, plain)[0]
        self.made_a_database = (self.workspace.root / "mlflow.db").exists()
        self.first = run_it(self.workspace, self.recipe)
        self.interrupted = run_it(self.workspace, self.recipe, "seed=4", until="evaluation")
        self.third = run_it(self.workspace, self.recipe, "seed=5")
        plain, _ = load_resolved(self.recipe, ["seed=4"])
        self.planned_again = next_run(self.workspace, plain)[0]
        self.resumed = run_it(self.workspace, self.recipe, "seed=4")

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.address)

    def version_with_alias(self) -> str:
        return str(self.client.get_model_version_by_alias("judged", "champion").version)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        (folder := tmp_path_factory.mktemp("challenger") / "here").mkdir()
        yield Life(folder)


def test_without_a_champion_the_named_stage_stands_in_for_it(life: Life) -> None:
    assert not life.made_a_database, "a plan makes none"
    champion = life.first.recipe.models["champion"]
    assert (champion.source, champion.stand_in) == ("models:/judged@champion#none", "model")
    assert life.planned_first == life.first.recipe
    assert {each.status for each in (life.first, life.third, life.resumed)} == {"completed"}
    assert "models.champion" not in life.first.stages
    parents = life.first.stages["evaluation"].key_parts["inputs"]
    assert parents["baseline"] == life.first.stages["model"].digest
    assert plan_warnings(life.first.recipe, plan(life.first.recipe, None, []))[0] == (
        "models.champion: MLflow has no registered model judged with the alias champion yet; model stands in for it in "
        "this run"
    )


def test_the_second_run_compares_with_what_the_first_has_published(life: Life) -> None:
    stage = life.interrupted.stages["models.champion"]
    storage, published = life.workspace.storage, life.first.stages["sft"]
    assert life.interrupted.recipe.models["champion"].source == f"models:/judged/1#{published.digest}"
    assert stage.digest is not None and stage.stage_key is not None and published.stage_key is not None
    imported, made = (storage.find(str(key)) for key in (stage.stage_key, published.stage_key))
    assert imported is not None and made is not None
    assert is_same(imported.artifact, made.artifact), "the same files"
    assert set(read_manifest(storage.folder(imported.artifact), digest=stage.digest)) == set(
        read_manifest(storage.folder(made.artifact), digest=str(published.digest))
    )
    folder = storage.folder(imported.artifact)
    assert load_policy(folder).num_parameters() > 0 and load_tokenizer(folder).eos_token


def test_a_resumed_run_compares_with_the_same_version_although_the_alias_has_moved(life: Life) -> None:
    first, third = (each.stages["sft"].digest for each in (life.first, life.third))
    assert first != third
    assert life.third.recipe.models["champion"].source == f"models:/judged/1#{first}"
    assert life.resumed.run_id == life.interrupted.run_id
    assert life.resumed.recipe == life.interrupted.recipe == life.planned_again, "pinned once"
    ref = life.workspace.storage.find(str(life.resumed.stages["evaluation"].stage_key))
    assert ref is not None
    assert ref.artifact.parents["baseline"] == life.interrupted.stages["models.champion"].digest
    # 1: the first run's, 2: the third's, 3: the resumed one's, which ended last
    assert life.version_with_alias() == "3"
    assert find_version(life.address, "judged", version="2").digest == third


def test_the_key_follows_the_content_and_not_the_alias_or_its_version(life: Life) -> None:
    with_alias, _ = load_resolved(life.recipe, ["seed=9"])
    by_version, _ = load_resolved(life.recipe, ["seed=9", "models.champion.source=models:/judged/3"])
    keys = [
        {step.name: step.stage_key for step in plan(pinned(each, life.workspace), life.workspace.storage, [])}
        for each in (with_alias, by_version)
    ]
    assert keys[0] == keys[1]
    older, _ = load_resolved(life.recipe, ["models.champion.source=models:/judged/1"])
    steps = plan(pinned(older, life.workspace), life.workspace.storage, [])
    other = {step.name: step for step in steps}["models.champion"]
    assert other.stage_key != keys[0]["models.champion"]
    assert (other.action, other.reasons[0]) == ("reuse", "judged version 1")


def test_a_plan_says_with_which_version_it_compares_and_writes_nothing(life: Life) -> None:
    database = life.workspace.root / "mlflow.db"
    before = (database.read_bytes(), [each.run_id for each in read_runs(life.workspace)])
    arguments = ["plan", str(life.recipe), "--set", "seed=6", "--workspace", life.workspace.address]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "judged version 3" in " ".join(done.output.split())
    assert before == (database.read_bytes(), [each.run_id for each in read_runs(life.workspace)])
    plain, _ = load_resolved(life.recipe, ["seed=6"])
    printed = io.StringIO()
    steps = plan(next_run(life.workspace, plain)[0], life.workspace.storage, [])
    show_plan(Console(file=printed, width=160), steps, heading="", warnings=[])
    assert "judged version 3" in printed.getvalue()


@pytest.mark.slow
def test_a_model_that_is_the_champion_is_compared_with_itself_and_no_alias_moves(life: Life) -> None:
    """The gate is closed, as wherever a model is compared with itself."""
    again = run_it(life.workspace, life.recipe, "seed=4")
    assert again.status == "gate_closed"
    assert again.run_id != life.resumed.run_id, "a finished run is not resumed"
    assert again.recipe.models["champion"].source.startswith("models:/judged/3#")
    assert again.stages["evaluation"].remark == (
        "sft holds the weights of models.champion: a model is compared with itself"
    )
    assert life.version_with_alias() == "3"


def test_a_model_judged_the_same_responses_and_is_among_the_parents(life: Life) -> None:
    stage = life.third.stages["evaluation"]
    has = settings_of(life.third.recipe.stages["evaluation"].model_dump())
    assert stage.metrics.keys() == headline_metric_names("evaluation", has=has)
    share = stage.metrics["order_disagreement"]
    assert share is not None and 0 <= share <= 1
    assert stage.key_parts["configuration"]["also"]["model"] == life.third.stages["models.grader"].digest


# What is refused


@pytest.mark.parametrize(
    ("name", "kind", "files", "what"),
    [
        (
            "scores",
            RewardModel,
            {"config.json": {"architectures": ["LlamaForSequenceClassification"]}},
            "version 1 of scores is a reward model; name one that a policy was published as",
        ),
        (
            "parts",
            PolicyCheckpoint,
            {"adapter_config.json": {}, "base.json": {"base": "0" * 64}},
            "version 1 of parts holds adapters alone; publish the whole model, with merge: true",
        ),
    ],
)
def test_a_reward_model_and_adapters_alone_are_refused(
    name: str,
    kind: type[StoredModel],
    files: dict[str, Any],
    what: str,
    life: Life,
    tmp_path: Path,
) -> None:
    """They are published as runs publish them, and only their descriptions are read."""
    (folder := tmp_path / name).mkdir()
    for file, content in {**files, "tokenizer_config.json": {}}.items():
        (folder / file).write_text(json.dumps(content))
    made = artifact(kind, name, {}, digest=seal(folder))
    with Ledger(None, life.workspace.root, name) as ledger:
        ledger.open_run(f"0099-{name}-abcdef", name, {})
        ledger.open_stage(name, kind="sft", stage_key=made.stage_key, attempt=1, params={}, inputs={})
        ledger.finish_stage(name, "completed", artifact=made)
        assert ledger.publish(name, made, folder, name, alias="champion") == "1"
        ledger.finish_run("completed")
    source = f"models:/{name}@champion"
    assert refused(life, f"models.champion.source={source}") == f"models.champion.source='{source}': {what}"


def refused(life: Life, *overrides: str) -> str:
    recipe, _ = load_resolved(life.recipe, overrides)
    before = len(read_runs(life.workspace))
    with (
        pytest.raises((RunError, RegistryUnavailable)) as error,
        orchestrated(life.workspace, life.recipe, *overrides),
    ):
        pass
    assert len(read_runs(life.workspace)) == before, "no run has begun"
    with pytest.raises(type(error.value), match=re.escape(str(error.value))):
        next_run(life.workspace, recipe)
    return str(error.value)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("models:/judged@runner-up", "MLflow has no registered model judged with the alias runner-up"),
        ("models:/nobody@champion", "MLflow has no registered model nobody with the alias champion"),
        ("models:/judged/77", "MLflow has no version 77 of a registered model judged"),
    ],
)
def test_what_mlflow_does_not_have_is_refused_unless_a_stage_stands_in(
    source: str, what: str, life: Life
) -> None:
    assert refused(life, f"models.champion={{source: '{source}'}}") == (
        f"models.champion.source='{source}': {what}; publish one first, or name the stage that stands in for it as "
        "`otherwise`"
    )
    recipe, _ = load_resolved(life.recipe, [f"models.champion.source={source}"])
    assert pinned(recipe, life.workspace).models["champion"].stand_in == "model"


def test_a_version_that_is_not_of_vantage_is_refused(life: Life, tmp_path: Path) -> None:
    life.client.create_registered_model("foreign")
    life.client.create_model_version("foreign", str(tmp_path))
    assert refused(life, "models.champion.source=models:/foreign/1") == (
        "models.champion.source='models:/foreign/1': version 1 of foreign was not published by Vantage; load it with "
        "MLflow, and give its folder"
    )


@pytest.mark.slow
def test_mlflow_that_does_not_answer_is_told_and_nobody_stands_in(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    said = refused(life, "seed=8")
    assert said.startswith(
        "models.champion.source='models:/judged@champion': MLflow at http://127.0.0.1:9 does not answer ("
    )
    assert said.endswith("; start it, or set MLFLOW_TRACKING_URI")
    program = [sys.executable, "-c", "from vantage.cli.main import main; main()"]
    command = [*program, "plan", str(life.recipe), "--set", "seed=8", "--workspace", life.workspace.address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.UNAVAILABLE, done
    assert "vantage: models.champion.source='models:/judged@champion': MLflow at" in done.stderr


def test_a_copy_that_is_not_what_the_run_has_pinned_fails_the_step_alone(life: Life, tmp_path: Path) -> None:
    changed = Registered("judged", version="2", pin="0" * 64)
    with pytest.raises(RunError, match=r"version 2 of judged holds .* the run compares with 000000000000"):
        fetch_registered(changed, life.workspace, tmp_path / "fetched")
    with pytest.raises(RunError, match=r"the run compares with version 88 of judged, and MLflow has no"):
        fetch_registered(
            Registered("judged", version="88", pin="0" * 64), life.workspace, tmp_path / "fetched"
        )
    assert list(tmp_path.iterdir()) == [], "nothing half-fetched is left"


def test_a_damaged_copy_is_refused(life: Life, tmp_path: Path) -> None:
    found = find_version(life.address, "judged", version="2")
    weights = Path(found.location.removeprefix("file://")) / "model" / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    try:
        with pytest.raises(
            RunError, match=r"MLflow's copy of judged version 2 is damaged: model: .*safetensors"
        ):
            fetch_registered(
                Registered("judged", version="2", pin=found.digest), life.workspace, tmp_path / "fetched"
            )
    finally:
        weights.write_bytes(intact)


@pytest.mark.usefixtures("model_threads")
def test_another_model_of_a_run_is_asked_and_exported_by_its_step(life: Life, tmp_path: Path) -> None:
    """``models.champion`` of the third run is what the first has published; its greedy responses are those of the stage."""
    run, first = life.third.run_id, life.first.run_id
    place = ("--workspace", str(life.workspace.root))
    options = ("1+1", "2+3", "--greedy", "--json", *place)
    asked = [
        json.loads(command("sample", f"{named}", *options).stdout)
        for named in (f"{run}/models.champion", f"{first}/sft")
    ]
    assert asked[0]["models"][0]["model"] == f"models.champion of run {run}"
    assert asked[0]["models"][0]["digest"] == life.third.stages["models.champion"].digest
    texts = [[row["answers"][0]["text"] for row in found["prompts"]] for found in asked]
    assert texts[0] == texts[1]
    beside = command("sample", run, "1+1", "--against", "models.champion", "--greedy", *place)
    assert "models.champion: " in beside.stdout

    told = json.loads(
        command("export", f"{run}/models.champion", str(tmp_path / "out"), "--json", *place).stdout
    )
    assert (told["stage"], told["digest"]) == (
        "models.champion",
        life.third.stages["models.champion"].digest,
    )
    ours, stored = (
        load_policy(folder).state_dict()
        for folder in (
            tmp_path / "out",
            life.workspace.store / "objects" / str(life.first.stages["sft"].digest),
        )
    )
    assert all(ours[name].equal(stored[name]) for name in stored)


def test_a_model_that_another_stands_in_for_is_named(life: Life) -> None:
    run, place = life.first.run_id, ("--workspace", str(life.workspace.root))
    refused = command("sample", f"{run}/models.champion", "1+1", *place, fails=True)
    assert f"MLflow had no models.champion when run {run} began, and model stands in for it" in refused.stderr
    refused = command("sample", f"{run}/models.other", "1+1", *place, fails=True)
    assert f"run {run} has no stage models.other; there are models.grader, model, sft" in refused.stderr


def command(*arguments: str, fails: bool = False) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code != 0) == fails, done.output
    return done
