"""``vantage diff`` compares runs, stages, models and recipes, in a folder and in a bucket."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.review.diff.small_runs import PROVENANCE, environment, make_run, write_recipe
from vantage.cli.main import app
from vantage.ledger.to_mlflow import published_models
from vantage.ledger.to_mlflow.published_models import NoSuchModel, PublishedVersion
from vantage.review.diff import printed
from vantage.review.diff.compare import Pair, _gates, _paired, compare
from vantage.review.diff.sides import Step, find_side
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.run import acquire_run_by_id
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.difference import Difference
from vantage.schemas.records.verdicts import check_gate
from vantage.storage.environments import keep_environment

PROMPTS = tuple(f"{n} + {n} =" for n in range(1, 25))
GATE = 'stages.evaluation.gate=[{"metric": "accuracy_gain", "at_least": 0.9, "on_fail": "continue"}]'


def even(prompt: str, sample: int) -> float:
    return float(int(prompt.split()[0]) % 2)


def half(prompt: str, sample: int) -> float:
    """Return the first of two rows that ``even`` has right."""
    return even(prompt, sample) * (sample == 0)


@dataclass(frozen=True)
class Two:
    """A workspace with two runs, of which the second has three demonstrations less and four more, and another rate."""

    workspace: Workspace
    recipe: Path
    a: RunRecord
    b: RunRecord

    def compare(self, a: str = "1", b: str = "2") -> Difference:
        return compare(self.workspace, find_side(self.workspace, a), find_side(self.workspace, b))

    def command(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["diff", *arguments, "--workspace", self.workspace.address])


def two_runs(folder: Path, workspace: Workspace) -> Two:
    recipe = write_recipe(folder / "one", range(60))
    other = write_recipe(folder / "other", range(3, 64))
    a = make_run(
        workspace, recipe, judge=even, prompts=PROMPTS, installed=environment(torch="2.13.0", rich="1")
    )
    b = make_run(
        workspace,
        other,
        "stages.sft.learning_rate=3.0e-3",
        GATE,
        judge=half,
        prompts=PROMPTS,
        provenance={**PROVENANCE, "torch": "2.14.0", "revision": "a" * 40},
        installed=environment(torch="2.14.0", rich="1", numpy="2"),
    )
    return Two(workspace, recipe, a, b)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/nothing.db")
        yield two_runs(folder, Workspace(folder / "workspace"))


def test_a_run_is_the_same_as_itself(two: Two) -> None:
    found = two.compare("1", two.a.run_id)
    assert found.is_same
    assert {stage.sharing for stage in found.stages} == {"shared"}
    assert found.metrics == ()
    assert two.command("1", "1").exit_code == 0


def test_fields_of_the_recipes_with_defaults_filled_in(two: Two) -> None:
    found = {each.field: (each.a, each.b) for each in two.compare().recipe}
    assert found.pop("stages.sft.learning_rate") == (1e-3, 3e-3)
    assert found.pop("stages.evaluation.gate.0.at_least") == (-1.0, 0.9)
    assert found.pop("stages.evaluation.gate.0.on_fail") == ("stop", "continue")
    assert list(found) == ["data.demonstrations.source"]


def test_which_stages_are_shared_and_why_the_others_are_not(two: Two) -> None:
    stages = {stage.step: stage for stage in two.compare().stages}
    assert {step: stage.sharing for step, stage in stages.items()} == {
        "model": "shared",
        "data.demonstrations": "differs",
        "data.prompts": "shared",
        "sft": "differs",
        "evaluation": "differs",
    }
    assert "configuration.learning_rate: 0.001 → 0.003" in stages["sft"].reasons
    assert any(reason.startswith("inputs.data: ") for reason in stages["sft"].reasons)
    assert stages["sft"].digest_a == two.a.stages["sft"].digest


def test_rows_added_and_removed(two: Two) -> None:
    (rows,) = two.compare().data
    assert (rows.step, rows.split, rows.rows_a, rows.rows_b) == ("data.demonstrations", "train", 60, 61)
    assert (rows.added, rows.removed) == (4, 3)
    assert rows.examples_added[0] == {"prompt": "60 + 60 =", "response": " 120"}
    assert [row["prompt"] for row in rows.examples_removed] == ["0 + 0 =", "1 + 1 =", "2 + 2 ="]


def test_code_and_libraries(two: Two) -> None:
    """The comparison shows differing parts of the provenance and libraries, and leaves out equal ones."""
    found = two.compare()
    parts = {each.part: each for each in found.provenance}
    assert (parts["torch"].a, parts["torch"].b) == ("2.13.0", "2.14.0")
    assert (parts["revision"].a, parts["revision"].b) == (None, "a" * 40), "an earlier version recorded none"
    assert parts["torch"].steps == ("data.demonstrations", "sft", "evaluation")
    assert {"code", "device"}.isdisjoint(parts)
    libraries = {each.field: (each.a, each.b, each.only) for each in found.libraries}
    assert libraries == {"torch": ("2.13.0", "2.14.0", None), "numpy": (None, "2", "b")}


def test_gates_with_thresholds_and_verdicts(two: Two) -> None:
    (gate,) = two.compare().gates
    assert (gate.passed_a, gate.passed_b, gate.threshold_differs) == (True, False, True)
    assert gate.a is not None
    assert gate.a.startswith("accuracy_gain 0.500 [")
    assert str(gate.b).endswith(">= 0.9: CLOSED")


def test_metrics_side_by_side_with_a_paired_difference(two: Two) -> None:
    found = {(each.step, each.metric): each for each in two.compare().metrics}
    gain = found["evaluation", "accuracy_gain"]
    # Of 24 prompts, 12 have lost one of two right responses: differences of −½ and 0, each 12 times.
    assert (gain.a, gain.b, gain.difference) == (0.5, 0.25, -0.25)
    assert gain.standard_error == pytest.approx((0.25**2 / 23) ** 0.5)
    assert (gain.paired, gain.n, gain.is_clear) == (True, 24, True)
    assert gain.interval_a is not None
    assert gain.interval_b is not None
    assert gain.interval_a[0] < gain.interval_b[1], "the two intervals overlap"
    assert found["sft", "test_nll"].interval is None, "no uncertainty is known"


def test_the_console_shows_all_of_it_and_the_exit_code_is_that_of_diff(two: Two) -> None:
    result = two.command("1", "2")
    assert result.exit_code == 1
    for text in (
        f"A  1  run {two.a.run_id}  recipe compared, completed",
        "stages.sft.learning_rate            0.001",
        '+ data.demonstrations train: {"prompt": "60 + 60 =", "response": " 120"}',
        "torch          2.13.0   2.14.0",
        "-0.25 [-0.358, -0.142] paired, 24 prompts",
        "2 of 5 stages shared",
    ):
        assert text in result.output, result.output


def test_values_are_shown_with_their_letters() -> None:
    assert printed._value({"é": [1, None]}) == '{"é": [1, null]}'
    assert printed._value("é") == "é"


def test_json_is_the_record(two: Two) -> None:
    result = two.command("1", "2", "--json")
    told = json.loads(result.output)
    assert result.exit_code == 1
    assert told.pop("is_same") is False
    assert Difference.model_validate(told) == two.compare()


def test_a_stage_is_compared_with_what_it_was_made_of_and_what_measured_it(two: Two) -> None:
    found = two.compare("1/data.demonstrations", "2/data.demonstrations")
    assert [stage.step for stage in found.stages] == ["data.demonstrations"]
    assert [each.field for each in found.recipe] == ["data.demonstrations.source"]
    assert {stage.step for stage in two.compare("1/sft", "2/sft").stages} == set(two.a.stages)
    assert "publish" not in {each.field for each in found.recipe}


def test_a_recipe_says_what_would_be_shared_before_anything_is_computed(two: Two) -> None:
    found = two.compare("1", str(two.recipe))
    assert found.is_same
    assert found.expected
    result = two.command("1", str(two.recipe), "--set", "stages.sft.learning_rate=0.5")
    assert result.exit_code == 1
    assert "3 of 5 stages would be shared" in result.output
    assert "configuration.learning_rate: 0.001 → 0.5" in result.output


def test_an_override_that_a_gate_alone_reads_shares_every_stage(two: Two) -> None:
    result = two.command(str(two.recipe), str(two.recipe), "--set", GATE)
    assert result.exit_code == 1
    assert "5 of 5 stages would be shared" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1", "nothing"), "nothing is no recipe, no run, and no registered model of MLflow"),
        (("1", "1/nope"), "has no stage nope; there are model, data.demonstrations"),
        (("1", "gone.yaml"), "gone.yaml"),
        (("1", "some@champion"), "no model that MLflow has"),
        (("1", "2", "--set", "seed=4"), "--set seed=4 changes a recipe, and neither 1 nor 2 is one"),
        (("0", "1"), "0 fits 0001-compared"),
    ],
)
def test_bad_names_are_one_sentence(two: Two, arguments: tuple[str, ...], message: str) -> None:
    result = two.command(*arguments)
    assert result.exit_code == 65
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def published(record: RunRecord, **changes: Any) -> PublishedVersion:
    stage = record.stages["sft"]
    fields = {
        "name": "small", "version": "3", "location": "", "digest": stage.digest, "stage": "sft", "stage_key": stage.stage_key,
        "run_id": record.run_id, "parents": {}, "params": {},
    }  # fmt: skip
    return PublishedVersion(**{**fields, **changes})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return MLflow's registered models: name with alias or version → version."""
    known: dict[str, Any] = {}

    def find(address: str, name: str, *, version: str | None, alias: str | None) -> Any:
        try:
            return known[f"{name}@{alias}" if alias else f"{name}/{version}" if version else name]
        except KeyError:
            raise NoSuchModel(f"MLflow has no registered model {name}") from None

    monkeypatch.setattr("vantage.ledger.tracking.is_missing_database", lambda address: False)
    monkeypatch.setattr(published_models, "find_version", find)
    return known


@pytest.mark.parametrize("named", ["small@champion", "models:/small@champion", "small/3", "small"])
def test_a_registered_model_is_the_stage_that_was_published(
    two: Two, registry: dict[str, Any], named: str
) -> None:
    registry |= dict.fromkeys(("small@champion", "small/3", "small"), published(two.b))
    side = find_side(two.workspace, named)
    assert (side.subject.kind, side.subject.run_id, side.subject.stage) == ("model", two.b.run_id, "sft")
    assert compare(two.workspace, find_side(two.workspace, "2/sft"), side).is_same
    assert not compare(two.workspace, find_side(two.workspace, "1/sft"), side).is_same


def test_a_model_that_its_run_did_not_make_is_refused(two: Two, registry: dict[str, Any]) -> None:
    registry["small@champion"] = published(two.b, digest="e" * 64)
    result = two.command("1", "small@champion")
    assert (result.exit_code, "holds eeeeeeeeeeee, and sft of run" in result.stderr) == (65, True)
    registry["small@champion"] = published(two.b, run_id="0009-gone-aaaaaa")
    result = two.command("1", "small@champion")
    assert (result.exit_code, "was published by run 0009-gone-aaaaaa" in result.stderr) == (65, True)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Workspace, Path]:
    return Workspace(tmp_path / "workspace"), write_recipe(tmp_path, range(9))


def test_the_same_work_with_other_bits_is_loud(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    make_run(workspace, recipe)
    make_run(workspace, recipe, weights="other bits")
    result = CliRunner().invoke(app, ["diff", "1", "2", "--workspace", workspace.address])
    assert result.exit_code == 1
    assert "NOT REPRODUCED: model" in result.output
    assert "the same key, and another artifact" in result.output


def test_what_one_run_has_not_computed(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    make_run(workspace, recipe)
    half_way = make_run(workspace, recipe, "stages.sft.learning_rate=0.5", until="evaluation")
    make_run(workspace, recipe, "stages.sft.learning_rate=0.5", until="evaluation")
    found = compare(workspace, *(find_side(workspace, named) for named in ("1", "2")))
    assert {stage.step: stage.sharing for stage in found.stages}["sft"] == "differs"
    assert [(stage.step, stage.sharing) for stage in found.stages][-1] == ("evaluation", "only_a")
    with acquire_run_by_id(workspace, half_way.run_id) as run:  # as a failed attempt is recorded
        run.set_stage(
            "evaluation", run.record.stages["sft"].model_copy(update={"digest": None, "stage_key": None})
        )
    found = compare(workspace, *(find_side(workspace, named) for named in ("2", "2")))
    assert found.is_same
    assert {stage.step: stage.sharing for stage in found.stages}["evaluation"] == "neither"


def test_a_renamed_stage_is_found_by_its_key(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    make_run(workspace, recipe)
    renamed = recipe.with_name("renamed.yaml")
    renamed.write_text(
        recipe.read_text().replace("  sft:", "  tuned:").replace("candidate: sft", "candidate: tuned")
    )
    make_run(workspace, renamed)
    found = compare(workspace, *(find_side(workspace, named) for named in ("1", "2")))
    assert {(stage.step, stage.step_b, stage.sharing) for stage in found.stages} >= {
        ("sft", "tuned", "shared")
    }
    assert all(stage.sharing == "shared" for stage in found.stages)


def test_other_prompts_are_not_paired_and_it_says_so(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    make_run(workspace, recipe, judge=even, prompts=PROMPTS)
    make_run(workspace, recipe, "stages.sft.learning_rate=0.5", judge=half, prompts=PROMPTS[2:])
    found = compare(workspace, *(find_side(workspace, named) for named in ("1", "2")))
    gain = next(each for each in found.metrics if each.metric == "accuracy_gain")
    assert (gain.paired, gain.interval is not None) == (False, True)
    assert found.notes == ("evaluation: measured on other prompts, so metrics are not paired",)


def test_a_store_that_has_lost_its_artifacts_still_has_the_records(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    make_run(workspace, recipe, judge=even)
    make_run(workspace, write_recipe(recipe.parent / "b", range(4)), judge=half)
    for ref in (workspace.store / "refs").iterdir():
        ref.unlink()
    found = compare(workspace, *(find_side(workspace, named) for named in ("1", "2")))
    gain = next(each for each in found.metrics if each.metric == "accuracy_gain")
    assert (gain.a is not None, gain.interval_a, gain.interval) == (True, None, None)
    assert found.data == ()
    assert any("does not have the samples of both sides" in note for note in found.notes)


def edit_record(workspace: Workspace, record: RunRecord, change: Callable[[Any], object]) -> None:
    path = workspace.folder(record.run_id) / "run.json"
    content = json.loads(path.read_bytes())
    change(content["stages"]["sft"])
    path.write_text(json.dumps(content))


def test_records_that_were_edited_are_shown_as_they_are(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    first = make_run(workspace, recipe)
    second = make_run(workspace, recipe, "stages.sft.learning_rate=0.5")
    edit_record(
        workspace, first, lambda sft: sft["metrics"].update({"[/bold]a": 1.0, "b\x1b": 2.0, "huge": 1.7e308})
    )
    edit_record(workspace, second, lambda sft: sft["metrics"].update({"huge": -1.7e308}))
    shown = CliRunner().invoke(app, ["diff", "1", "2", "--workspace", workspace.address])
    assert shown.exit_code == 1, shown.output
    assert "[/bold]a" in shown.output
    assert "b\\u001b" in shown.output
    assert "1.7e+308" in shown.output
    told = CliRunner().invoke(app, ["diff", "1", "2", "--workspace", workspace.address, "--json"])
    assert json.loads(told.output, parse_constant=pytest.fail)["is_same"] is False


def test_a_record_whose_key_is_no_key(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    record = make_run(workspace, recipe)
    make_run(workspace, recipe, "stages.sft.learning_rate=0.5")
    edit_record(workspace, record, lambda sft: sft.update(stage_key="../../x"))
    found = compare(workspace, *(find_side(workspace, named) for named in ("1", "2")))
    assert {stage.step: stage.sharing for stage in found.stages}["sft"] == "differs"


def test_a_run_that_has_recorded_no_stage(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    make_run(workspace, recipe, until="model")
    result = CliRunner().invoke(app, ["diff", "1", "1/sft", "--workspace", workspace.address])
    assert result.exit_code == 65
    assert "has no stage sft; it has recorded none yet" in result.stderr


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda path: path.write_bytes(b"PAR1xPAR1"), "A: train.parquet: has 9 bytes, must have"),
        (lambda path: path.unlink(), "A: train.parquet: is missing"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "not a parquet file"),
    ],
    ids=["short", "gone", "zeros"],
)
def test_damaged_rows_are_told_and_not_compared(
    small: tuple[Workspace, Path], damage: Callable[[Path], object], said: str
) -> None:
    """Compared, damaged rows would look as if they had been removed."""
    workspace, recipe = small
    record = make_run(workspace, recipe, judge=even)
    make_run(workspace, write_recipe(recipe.parent / "b", range(4)), judge=half)
    folder = workspace.store / "objects" / str(record.stages["data.demonstrations"].digest)
    folder.chmod(0o755)
    (folder / "train.parquet").chmod(0o644)
    damage(folder / "train.parquet")
    found = compare(workspace, *(find_side(workspace, named) for named in ("1", "2")))
    assert found.data == ()
    [note] = found.notes
    assert note.startswith("data.demonstrations: files are damaged and not compared: ")
    assert said in note
    assert any(each.paired for each in found.metrics), "what is intact is compared"


def test_a_metric_may_have_a_bound_each_way(small: tuple[Workspace, Path]) -> None:
    workspace, recipe = small
    low = '{"metric": "accuracy_gain", "at_least": -1.0}'
    for high in (0.5, 0.6):
        bound = f'{{"metric": "accuracy_gain", "at_most": {high}, "on_fail": "continue"}}'
        make_run(workspace, recipe, f"stages.evaluation.gate=[{low}, {bound}]", judge=even)
    found = compare(workspace, *(find_side(workspace, named) for named in ("1", "2")))
    (gate,) = found.gates
    assert (gate.passed_a, gate.passed_b, gate.threshold_differs) == (False, True, True)
    assert {stage.sharing for stage in found.stages} == {"shared"}, "a threshold is in no key"


def test_a_damaged_list_of_libraries_is_told(two: Two, tmp_path: Path) -> None:
    digest = keep_environment(two.workspace.storage, environment(torch="2.13.0", rich="1"))
    path = two.workspace.store / "environments" / f"{digest}.json"
    kept = path.read_bytes()
    path.write_bytes(b"{}")
    try:
        found = two.compare()
    finally:
        path.write_bytes(kept)
    assert found.libraries == ()
    assert any("is damaged" in note for note in found.notes)


@pytest.mark.slow
def test_in_a_bucket(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs in a bucket are compared like those in a folder."""
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    found = two_runs(tmp_path, Workspace.at(bucket)).compare()
    assert (found.data[0].added, found.data[0].removed) == (4, 3)
    assert {each.field for each in found.libraries} == {"torch", "numpy"}
    assert any(each.paired for each in found.metrics)


def step_of(name: str, kind: str, key: str, **record: Any) -> Step:
    gates = (Gate(metric="accuracy", at_least=0.5),)
    return Step(name, kind, gates, key, {}, StageRecord(**record))


def side_of(*steps: Step) -> Any:
    return SimpleNamespace(subject=SimpleNamespace(stage=None), steps={each.name: each for each in steps})


def test_steps_with_one_name_and_another_kind_are_no_pair() -> None:
    ours = side_of(step_of("last", "sft", "1"), step_of("first", "dpo", "2"))
    theirs = side_of(step_of("last", "dpo", "2"), step_of("other", "kto", "3"))
    pairs, only_ours, only_theirs = _paired(ours, theirs, ours.steps, theirs.steps)
    assert [(pair.a.name, pair.b.name) for pair in pairs] == [("first", "last")], "by its key"
    assert [step.name for step in only_ours] == ["last"]
    assert [step.name for step in only_theirs] == ["other"]


def test_a_gate_with_one_bound_differs_where_its_verdicts_do() -> None:
    sides = [
        step_of(
            "last",
            "evaluation",
            key,
            verdicts=(check_gate(Gate(metric="accuracy", at_least=0.5), {"accuracy": accuracy}),),
        )
        for key, accuracy in (("1", 0.4), ("2", 0.9))
    ]
    [found] = _gates(Pair(*sides))
    assert (found.threshold_differs, found.passed_a, found.passed_b) == (False, False, True)
    assert not list(_gates(Pair(sides[0], sides[0])))
