"""A recipe may start from a stage of another run: what is found, pinned, planned, kept and refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.review.diff.small_runs import make_run, write_recipe
from vantage.attempts.jobs import work_of
from vantage.flows.pools.pipelines import pipeline_of
from vantage.runs.models_of_runs import fetch_stage
from vantage.runs.needed_artifacts import needed_artifacts
from vantage.runs.pinning import pinned
from vantage.runs.planning import PlannedStep, plan
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run, acquire_run_by_id, next_run, read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.sources import StageOfRun, model_source
from vantage.schemas.recipe.work import copied_stage
from vantage.schemas.records.firings import EndedEarly

FURTHER = """\
recipe: further
seed: 5
model: {{source: "{source}"}}
data:
  demonstrations: {{source: demonstrations.jsonl}}
stages:
  more: {{kind: sft, data: demonstrations, learning_rate: 1.0e-3}}
"""


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, range(9))


def further(folder: Path, source: str) -> Path:
    (path := folder / "further.yaml").write_text(FURTHER.format(source=source))
    return path


def resolved_source(place: Workspace, recipe: Path, *overrides: str) -> str:
    recipe_now, _ = load_resolved(recipe, overrides, workspace=place)
    return pinned(recipe_now, place).model.source


def refusal(place: Workspace, recipe: Path) -> str:
    """Return the message, which a run and a plan both give; no run is created."""
    before = len(read_runs(place))
    recipe_now, _ = load_resolved(recipe, workspace=place)
    with pytest.raises(RunError) as error:
        next_run(place, recipe_now)
    with (
        pytest.raises(RunError, match=re.escape(str(error.value))),
        acquire_run(place, recipe_now, source=str(recipe)),
    ):
        pass
    assert len(read_runs(place)) == before
    return str(error.value)


def planned(place: Workspace, recipe: Path) -> dict[str, PlannedStep]:
    recipe_now, _ = load_resolved(recipe, workspace=place)
    found, _ = next_run(place, recipe_now)
    return {step.name: step for step in plan(found, place.existing_storage, read_runs(place))}


@pytest.mark.parametrize(
    "form", ["latest/sft", "1/sft", "0001-comp/sft", "run:latest/sft", "{id}/sft", "run:{id}/sft"]
)
def test_every_form_is_pinned_to_the_run_and_to_what_it_has_made(
    place: Workspace, compared: Path, form: str
) -> None:
    made = make_run(place, compared)
    recipe = further(compared.parent, form.format(id=made.run_id))
    assert resolved_source(place, recipe) == f"run:{made.run_id}/sft#{made.stages['sft'].digest}"


def test_a_pinned_source_is_read_back() -> None:
    text = f"run:0001-compared-59aaf7/models.before#{'a' * 64}"
    assert model_source(text) == StageOfRun("0001-compared-59aaf7", "models.before", "a" * 64)
    assert str(model_source(text)) == text


def test_latest_is_the_newest_run_whose_recipe_has_the_step(place: Workspace, compared: Path) -> None:
    first, second = make_run(place, compared), make_run(place, compared, "seed=4")
    assert first.stages["sft"].digest != second.stages["sft"].digest
    recipe = further(compared.parent, "latest/sft")
    with acquire_run(place, load_resolved(recipe)[0], source=str(recipe)) as run:
        run.update(status="failed")
    assert read_runs(place)[0].recipe.recipe == "further", "and it has no stage sft"
    assert (
        resolved_source(place, recipe, "seed=6") == f"run:{second.run_id}/sft#{second.stages['sft'].digest}"
    )


def test_an_unfinished_run_keeps_its_model_and_a_new_one_has_another_key(
    place: Workspace, compared: Path
) -> None:
    first = make_run(place, compared)
    recipe = further(compared.parent, "latest/sft")
    before = planned(place, recipe)["model"]
    assert (before.action, before.reasons[0]) == ("run", f"sft of run {first.run_id}")
    begun = make_run(place, recipe, until="more")
    second = make_run(place, compared, "seed=4")

    again = planned(place, recipe)["model"]
    assert (again.action, again.stage_key) == ("reuse", before.stage_key), "the unfinished run goes on"
    with acquire_run_by_id(place, begun.run_id) as run:
        run.update(status="completed")
    assert begun.recipe.model.source == f"run:{first.run_id}/sft#{first.stages['sft'].digest}"
    new = planned(place, recipe)["model"]
    digests = [str(run.stages["sft"].digest)[:12] for run in (first, second)]
    assert new.action == "run"
    assert new.reasons == (f"sft of run {second.run_id}", f"inputs.source: {digests[0]} → {digests[1]}")


def test_the_key_follows_the_content_and_not_its_name(place: Workspace, compared: Path) -> None:
    make_run(place, compared)
    keys = {
        planned(place, further(compared.parent, name))["model"].stage_key for name in ("latest/sft", "1/sft")
    }
    assert len(keys) == 1


def test_rates_that_are_left_open_need_the_width_of_the_model(place: Workspace, compared: Path) -> None:
    make_run(place, compared)  # the files of fake stages are no real model
    recipe = further(compared.parent, "latest/sft")
    recipe.write_text(recipe.read_text().replace(", learning_rate: 1.0e-3", ""))
    said = (
        "stages.more.learning_rate: left to the model's width, but config.json of latest/sft cannot be read"
    )
    with pytest.raises(ValueError, match=said):
        load_resolved(recipe, workspace=place)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("latest/nothing", "run {id} has no step nothing; it has {id}/model, {id}/sft"),
        ("latest/evaluation", "evaluation of run {id} is no model (evaluation), and model.source takes a policy; name {id}/model, {id}/sft"),
        ("7/sft", "there is no run 7 in {place}; `"),
    ],
)  # fmt: skip
def test_what_is_no_policy_of_a_run_is_refused(
    place: Workspace, compared: Path, source: str, message: str
) -> None:
    made = make_run(place, compared)
    said = refusal(place, further(compared.parent, source))
    expected = f"model.source='run:{source}': " + message.format(id=made.run_id, place=place.root)
    assert said.startswith(expected)


def test_without_any_run_there_is_none(place: Workspace, compared: Path) -> None:
    assert refusal(place, further(compared.parent, "latest/sft")) == (
        f"model.source='run:latest/sft': there is no run in {place.root} yet"
    )


def test_an_unfinished_stage_is_refused_and_the_last_that_is_made_is_named(
    place: Workspace, compared: Path
) -> None:
    first = make_run(place, compared)
    begun = make_run(place, compared, "seed=4", until="sft")
    recipe = further(compared.parent, "latest/sft")
    assert refusal(place, recipe) == (
        f"model.source='run:latest/sft': sft of run {begun.run_id} is waiting and has made no model yet; write "
        f"{first.run_id}/sft, which is made, or let `vantage resume {begun.run_id}` end first"
    )
    by_id = further(compared.parent, f"{begun.run_id}/sft")
    assert refusal(place, by_id).endswith(f"no model yet; let `vantage resume {begun.run_id}` end first")


def test_a_run_cannot_begin_with_its_own_stage(place: Workspace, compared: Path) -> None:
    """``latest`` means the run's own stage as long as it is unfinished; an earlier run of the recipe is no cycle."""
    recipe = further(compared.parent, "latest/more")
    with pytest.raises(RunError, match="there is no run in"):
        pinned(load_resolved(recipe)[0], place)
    make_run(place, further(compared.parent, "builtin:tiny"), "seed=1")
    begun = make_run(place, further(compared.parent, "latest/more"), until="more")
    recipe_now, _ = load_resolved(recipe, ["seed=9"])
    with pytest.raises(
        RunError, match=f"more of run {begun.run_id} is waiting and has made no model yet; write 0001-"
    ):
        pinned(recipe_now, place)


def test_what_the_store_has_no_longer_is_refused(place: Workspace, compared: Path) -> None:
    made = make_run(place, compared)
    (place.store / "refs" / f"{made.stages['sft'].stage_key}.json").unlink()
    assert refusal(place, further(compared.parent, "latest/sft")).endswith(
        f"the store has no model of sft of run {made.run_id} any longer; run its recipe again"
    )


def edited(place: Workspace, made: RunRecord, **fields: Any) -> None:
    """Change fields of the artifact's description in its ref."""
    path = place.store / "refs" / f"{made.stages['sft'].stage_key}.json"
    ref = json.loads(path.read_text())
    ref["artifact"] |= fields
    path.write_text(json.dumps(ref))


def test_adapters_alone_are_refused(place: Workspace, compared: Path) -> None:
    made = make_run(place, compared)
    edited(place, made, base="b" * 64)
    assert refusal(place, further(compared.parent, "latest/sft")) == (
        f"model.source='run:latest/sft': sft of run {made.run_id} is adapters without the model beneath them; name the "
        f"folder that `vantage export {made.run_id}/sft FOLDER` writes"
    )


def test_a_stage_that_ended_early_is_marked(place: Workspace, compared: Path) -> None:
    made = make_run(place, compared)
    early = EndedEarly(step=3, total=10, by="guard", reason="approx_kl")
    edited(place, made, ended_early=early.model_dump(mode="json"))
    assert planned(place, further(compared.parent, "latest/sft"))["model"].reasons[:2] == (
        f"sft of run {made.run_id}",
        "which finished at 3 of 10 by guard approx_kl",
    )


def test_the_model_is_kept_for_a_run_that_has_not_copied_it_yet(place: Workspace, compared: Path) -> None:
    made = make_run(place, compared)
    begun = make_run(place, further(compared.parent, "latest/sft"), until="model")
    refs = {
        key: ref
        for step in made.stages.values()
        if (key := str(step.stage_key)) and (ref := place.storage.find(key)) is not None
    }
    gone = made.model_copy(update={"status": "removed"})
    needed = needed_artifacts([gone, begun], refs)
    lineage = {str(made.stages[step].stage_key) for step in ("sft", "model", "data.demonstrations")}
    assert lineage <= needed.stage_keys, "and all that it was made of"
    assert not lineage & needed_artifacts([gone], refs).stage_keys


def test_the_files_are_compared_with_the_pin_when_they_are_fetched(
    place: Workspace, compared: Path, tmp_path: Path
) -> None:
    made = make_run(place, compared)
    origin = StageOfRun(made.run_id, "sft", made.stages["sft"].digest)
    fetch_stage(origin, place, tmp_path / "fetched")
    objects = place.store / "objects" / str(origin.digest)
    names = {path.name for path in objects.iterdir()} - {"manifest.json", "metrics.json"}
    assert {path.name for path in (tmp_path / "fetched").iterdir()} == names
    with pytest.raises(RunError, match=r"was 000000000000 when this run began, and the store has"):
        fetch_stage(StageOfRun(made.run_id, "sft", "0" * 64), place, tmp_path / "other")
    changed = next(path for path in objects.iterdir() if path.name in names)
    changed.chmod(0o600)
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    with pytest.raises(RunError, match=r"sft of run .* is damaged: .*; run its recipe again"):
        fetch_stage(origin, place, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


# Reward models


SCORED = """\
recipe: scored
seed: 5
model: {source: "builtin:tiny"}
models:
  bought: {source: "SOURCE"}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 200}
rewards:
  main: {terms: [{model: bought}]}
stages:
  collected: {kind: rollout_collection, policy: model, prompts: prompts, reward: main}
"""
REWARDED = """\
recipe: rewarded
seed: 3
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: demonstrations.jsonl}
  preferences: {source: "builtin:arithmetic/preferences", rows: 48}
stages:
  sft: {kind: sft, data: demonstrations, learning_rate: 1.0e-3}
  reward: {kind: reward_model, init: sft, data: preferences, learning_rate: 1.0e-3}
"""


@pytest.fixture
def rewarded(place: Workspace, compared: Path) -> RunRecord:
    """Return a run whose stage ``reward`` has made a reward model."""
    (path := compared.parent / "rewarded.yaml").write_text(REWARDED)
    return make_run(place, path)


def scored(folder: Path, source: str) -> Path:
    (path := folder / "scored.yaml").write_text(SCORED.replace("SOURCE", source))
    return path


@pytest.mark.parametrize("form", ["latest/reward", "{id}/reward", "run:1/reward"])
def test_a_term_scores_with_a_reward_model_of_another_run(
    place: Workspace, compared: Path, rewarded: RunRecord, form: str
) -> None:
    recipe = scored(compared.parent, form.format(id=rewarded.run_id))
    found = pinned(load_resolved(recipe, workspace=place)[0], place)
    digest = rewarded.stages["reward"].digest
    assert found.models["bought"].source == f"run:{rewarded.run_id}/reward#{digest}"
    step = planned(place, recipe)["models.bought"]
    assert (step.action, step.reasons[0]) == ("run", f"reward of run {rewarded.run_id}")
    work = work_of(found, "models.bought")
    assert work.kind == "import_reward_model"
    assert copied_stage(work) == StageOfRun(rewarded.run_id, "reward", digest)


@pytest.mark.parametrize(
    ("recipe", "source", "message"),
    [
        (scored, "latest/sft", "models.bought.source='run:latest/sft': sft of run {id} is a policy, and models.bought.source takes a reward "
         "model, since a reward scores with it; name {id}/reward"),
        (scored, "1/nothing", "models.bought.source='run:1/nothing': run {id} has no step nothing; it has {id}/reward"),
        (further, "latest/reward", "model.source='run:latest/reward': reward of run {id} is a reward model, and model.source takes a policy; "
         "name {id}/model, {id}/sft"),
    ],
)  # fmt: skip
def test_a_stage_that_makes_another_kind_of_model_is_refused(
    place: Workspace, compared: Path, rewarded: RunRecord, recipe: Any, source: str, message: str
) -> None:
    assert refusal(place, recipe(compared.parent, source)) == message.format(id=rewarded.run_id)


# The recipe's text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("run:latest", "'run:latest' names no stage of a run; write RUN/STAGE, as in latest/policy or 0007/sft"),
        ("run:", "'run:' names no stage of a run; write RUN/STAGE"),
        ("latest", "there is no folder {folder}/latest; name a Hugging Face folder"),
        ("latest/folder", "'latest/folder' means a folder and a stage of a run; write ./latest/folder or run:latest/folder"),
    ],
)  # fmt: skip
def test_a_text_that_names_no_stage_or_two_things_is_refused(
    compared: Path, source: str, message: str
) -> None:
    if source == "latest/folder":
        (compared.parent / source).mkdir(parents=True)
    with pytest.raises(RecipeError, match=re.escape(message.format(folder=compared.parent))):
        load_resolved(further(compared.parent, source))


def test_a_stage_of_another_run_is_a_source_and_no_name(compared: Path) -> None:
    message = (
        "stages.more.init: 'latest/sft' is a stage of another run, and no name; write source: latest/sft under model or "
        "models.NAME, and name that model here"
    )
    recipe = further(compared.parent, "builtin:tiny")
    recipe.write_text(recipe.read_text().replace("data: demo", "init: latest/sft, data: demo"))
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_resolved(recipe)


# Elsewhere


def test_a_model_in_a_bucket_is_found_and_fetched(
    bucket: str, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "one machine"))
    made = make_run(Workspace.at(bucket), compared)
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "another"))
    there = Workspace.at(bucket)
    source = model_source(resolved_source(there, further(compared.parent, "latest/sft")))
    assert source == StageOfRun(made.run_id, "sft", made.stages["sft"].digest)
    fetch_stage(source, there, tmp_path / "fetched")
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == ["weights.txt"]


def test_a_deployment_looks_again_each_time(place: Workspace, compared: Path) -> None:
    make_run(place, compared)
    recipe = further(compared.parent, "latest/sft")
    options = {"workspace": place.address, "pool": "gpus"}
    assert "source: run:latest/sft" in pipeline_of(str(recipe), [], **options).recipe
    changed = pipeline_of(str(recipe), ["model.source=1/sft"], **options)
    assert "model.source=run:1/sft" in " ".join(changed.overrides).replace("'", "").replace('"', "")


def test_what_is_pinned_once_stays(place: Workspace, compared: Path) -> None:
    """A sweep pins its arms and then begins each of its runs with them."""
    make_run(place, compared)
    once = pinned(load_resolved(further(compared.parent, "latest/sft"))[0], place)
    make_run(place, compared, "seed=4")
    assert pinned(once, place) == once
