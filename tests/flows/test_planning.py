"""Plans against stores that fake stages have filled."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from lives import live_all, lives, pace

from flows.planning import Drifted, PlannedStep, needs_work, plan, refuse_drift
from flows.runs import Workspace, read_runs
from schemas.loading import load_recipe
from tasks.store import Store

STEPS = [
    "model",
    "data.demonstrations",
    "data.preferences",
    "data.prompts",
    "sft",
    "reward",
    "value",
    "policy",
    "evaluation",
]


def planned(workspace: Workspace, recipe: Path, *overrides: str) -> dict[str, PlannedStep]:
    store = Store(workspace.store) if workspace.store.exists() else None
    return {step.name: step for step in plan(load_recipe(recipe, overrides), store, read_runs(workspace))}


def actions(steps: dict[str, PlannedStep], names: Sequence[str] = STEPS) -> list[str]:
    return [steps[name].action for name in names]


def run_all(workspace: Workspace, recipe: Path, *overrides: str, until: str | None = None) -> None:
    with lives(workspace, recipe, *overrides) as life:
        live_all(life, until=until)
        life.run.update(status=life.run.outcome())


def test_in_an_empty_workspace_the_first_steps_run_and_the_rest_waits(
    workspace: Workspace, recipe_file: Path
) -> None:
    steps = planned(workspace, recipe_file)
    assert list(steps) == STEPS
    assert actions(steps) == ["run"] * 4 + ["wait"] * 5
    assert steps["model"].reasons == ("never run here",)
    assert steps["sft"].waits_for == ("model", "data.demonstrations")
    assert steps["sft"].reasons == ("for model, data.demonstrations",)
    assert steps["sft"].stage_key is None
    assert not workspace.root.exists(), "a plan writes nothing"


def test_a_finished_recipe_is_reused_and_says_by_whom_it_was_made(
    workspace: Workspace, recipe_file: Path
) -> None:
    run_all(workspace, recipe_file)
    steps = planned(workspace, recipe_file)
    assert actions(steps) == ["reuse"] * 9
    assert not needs_work(list(steps.values()))
    assert steps["value"].reasons[0].startswith("made by run 0001-fake-")
    assert steps["value"].reasons[1] == "gate explained_variance 0.400 >= 0.3: passed"


def test_a_changed_switch_is_named_with_both_values(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file)
    steps = planned(workspace, recipe_file, "stages.policy.algorithm.clip_range_high=0.2")
    assert actions(steps) == ["reuse"] * 7 + ["run", "wait"]
    assert steps["policy"].reasons == ("configuration.algorithm.clip_range_high: 0.28 → 0.2",)
    assert steps["evaluation"].reasons == ("for policy",)


def test_a_waiting_step_says_what_changed_in_itself(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file)
    steps = planned(workspace, recipe_file, "stages.sft.epochs=2", "stages.reward.learning_rate=0.5")
    assert steps["sft"].reasons == ("configuration.epochs: 1.0 → 2.0",)
    assert steps["reward"].reasons == ("for sft", "configuration.learning_rate: 1e-05 → 0.5")


def test_a_changed_seed_spares_the_data(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file)
    steps = planned(workspace, recipe_file, "seed=18")
    assert actions(steps) == ["run"] + ["reuse"] * 3 + ["wait"] * 5
    assert steps["model"].reasons == ("seed: 17 → 18",)


def test_what_a_file_holds_counts_and_not_where_it_lies(workspace: Workspace, recipe_file: Path) -> None:
    rows = recipe_file.with_name("rows.jsonl")
    rows.write_text('{"prompt": "1+1?", "response": "2"}\n')
    source = f"data.demonstrations.source={rows}"
    run_all(workspace, recipe_file, source)
    moved = rows.rename(rows.with_name("moved.jsonl"))
    source = f"data.demonstrations.source={moved}"
    assert planned(workspace, recipe_file, source)["data.demonstrations"].action == "reuse"
    moved.write_text('{"prompt": "1+1?", "response": "3"}\n')
    step = planned(workspace, recipe_file, source)["data.demonstrations"]
    assert step.action == "run"
    assert step.reasons[0].startswith("inputs.source: ")


def test_an_interrupted_stage_is_resumed_at_its_checkpoint(workspace: Workspace, recipe_file: Path) -> None:
    pace(workspace, 0.4)
    with lives(workspace, recipe_file) as life:
        live_all(life, until="sft")
        life.watcher.progressed = lambda step, report: life.stop.set() if report.step >= 5 else None  # type: ignore[method-assign]
        assert life.live("sft").status == "resumable"
        saved_at = int(str(life.run.record.stages["sft"].reason).split("after step ")[1].split(";")[0])
    step = planned(workspace, recipe_file)["sft"]
    assert (step.action, step.at_step) == ("resume", saved_at)
    assert step.said == f"resume at {saved_at}"
    assert step.reasons == ("attempt 1 was interrupted",)


def test_a_stage_that_failed_says_so(workspace: Workspace, recipe_file: Path) -> None:
    with lives(workspace, recipe_file) as life:
        live_all(life, until="sft")
        life.stage_function = "fake_work.refuse"
        life.live("sft")
    step = planned(workspace, recipe_file)["sft"]
    assert (step.action, step.reasons) == ("run", ("failed before",))


def test_a_closed_gate_blocks_what_reads_the_stage(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file)
    steps = planned(workspace, recipe_file, "stages.value.gate.at_least=0.9")
    assert actions(steps) == ["reuse"] * 7 + ["blocked"] * 2
    assert steps["policy"].reasons == ("reads value, whose gate is closed",)
    assert steps["evaluation"].reasons == ("reads policy, which would be blocked",)
    assert not needs_work(list(steps.values()))


def test_damage_is_said_and_nothing_is_moved(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file, until="reward")
    digest = planned(workspace, recipe_file)["sft"].digest
    damaged = workspace.store / "objects" / str(digest) / "weights.txt"
    damaged.write_text("flipped")
    step = planned(workspace, recipe_file)["sft"]
    assert step.action == "run"
    assert step.reasons[0].startswith(f"damaged: objects/{digest}")
    assert damaged.exists()


def test_an_artifact_that_was_removed_is_missed(workspace: Workspace, recipe_file: Path) -> None:
    run_all(workspace, recipe_file, until="reward")
    key = planned(workspace, recipe_file)["sft"].stage_key
    (workspace.store / "refs" / f"{key}.json").unlink()
    step = planned(workspace, recipe_file)["sft"]
    assert (step.action, step.reasons) == ("run", ("no artifact in the store",))


def test_drift_is_shown_and_refused_when_strict(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all(workspace, recipe_file, until="reward")
    steps = planned(workspace, recipe_file)
    assert steps["sft"].drift == ()
    refuse_drift(list(steps.values()))

    monkeypatch.setattr("flows.planning.provenance", lambda kind, *, threads: {"torch": "9.0"})
    steps = planned(workspace, recipe_file)
    assert steps["sft"].action == "reuse"
    assert [difference.split(" → ")[1] for difference in steps["sft"].drift] == ["9.0"]
    with pytest.raises(Drifted, match=r"sft: torch: 2\..* → 9\.0.*run without --strict"):
        refuse_drift(list(steps.values()))


def test_a_source_that_has_gone_is_an_error_that_names_it(workspace: Workspace, recipe_file: Path) -> None:
    rows = recipe_file.with_name("rows.jsonl")
    rows.write_text("{}\n")
    recipe = load_recipe(recipe_file, [f"data.demonstrations.source={rows}"])
    rows.unlink()
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
        plan(recipe, None, [])
