"""Plans are right on stores that fake stages have filled."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.orchestrated import attempt, attempt_all, events, orchestrated, pace
from vantage.runs.planning import (
    DriftError,
    PlannedStep,
    check_drift,
    needs_work,
    plan,
)
from vantage.runs.resolving import load_resolved
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.problems import RecipeError
from vantage.storage.store import Store
from vantage.tasks.training.scratch import write_committed

pytestmark = pytest.mark.usefixtures("unsent")

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
    return {
        step.name: step
        for step in plan(load_resolved(str(recipe), overrides)[0], store, read_runs(workspace))
    }


def actions(steps: dict[str, PlannedStep], names: Sequence[str] = STEPS) -> list[str]:
    return [steps[name].action for name in names]


def run_all(workspace: Workspace, recipe: Path, *overrides: str, until: str | None = None) -> None:
    with orchestrated(workspace, recipe, *overrides, in_process=True) as orchestrator:
        attempt_all(orchestrator, until=until)
        orchestrator.run.update(status=orchestrator.run.outcome())


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
    changed, not_extended = steps["sft"].reasons
    assert changed == "configuration.epochs: 1.0 → 2.0"
    assert "/sft (1 epoch): its training state was not kept" in not_extended
    assert steps["reward"].reasons == ("for sft", "configuration.learning_rate: 0.00032 → 0.5")


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


VERIFIED = (
    "rewards.main.terms=[{model: reward}, {verifier: mine}]",
    "stages.evaluation.judge.verifier=mine",
)
"""The value stage, the policy and the evaluation read it; SFT and the reward model do not."""


COMPARISON = "verifiers={mine: {source: 'builtin:exact_match'}}"


def answered(recipe: Path) -> tuple[str]:
    """Return an override that reads the prompts from a file that may have answers."""
    recipe.with_name("prompts.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    return (f"data.prompts.source={recipe.with_name('prompts.jsonl')}",)


@pytest.mark.slow
def test_a_changed_verifier_is_imported_again_and_its_readers_run_again(
    workspace: Workspace, recipe_file: Path
) -> None:
    file = recipe_file.with_name("mine.py")
    file.write_text("def verify(prompt, response, answer):\n    return True\n")
    overrides = (*VERIFIED, f"verifiers={{mine: {{source: {file}}}}}")
    run_all(workspace, recipe_file, *overrides)
    steps = planned(workspace, recipe_file, *overrides)
    assert set(actions(steps, list(steps))) == {"reuse"}
    assert list(steps)[:5] == [*STEPS[:4], "verifiers.mine"]

    moved = file.rename(file.with_name("moved.py"))
    overrides = (*VERIFIED, f"verifiers={{mine: {{source: {moved}}}}}")
    assert planned(workspace, recipe_file, *overrides)["verifiers.mine"].action == "reuse"

    moved.write_text("def verify(prompt, response, answer):\n    return False\n")
    steps = planned(workspace, recipe_file, *overrides)
    assert {name for name, step in steps.items() if step.action != "reuse"} == {
        "verifiers.mine",
        "value",
        "policy",
        "evaluation",
    }
    assert steps["verifiers.mine"].action == "run"
    assert steps["verifiers.mine"].reasons[0].startswith("inputs.source: ")
    assert steps["value"].reasons == ("for verifiers.mine",)

    before = len(events(workspace))
    run_all(workspace, recipe_file, *overrides)
    finished = [line.split()[0] for line in events(workspace)[before:] if " finished " in line]
    assert finished == ["verifiers.mine", "value", "policy", "evaluation"]


@pytest.mark.slow
def test_what_a_changed_verifier_changes_is_said_where_it_is_read(
    workspace: Workspace, recipe_file: Path
) -> None:
    overrides = (*answered(recipe_file), VERIFIED[1])
    run_all(workspace, recipe_file, COMPARISON, *overrides)
    changed = "verifiers={mine: {source: 'builtin:exact_match', extract: '#(.*)'}}"
    steps = planned(workspace, recipe_file, changed, *overrides)
    assert steps["verifiers.mine"].reasons == ("configuration.verifier.extract: null → #(.*)",)
    assert [name for name, step in steps.items() if step.action != "reuse"] == [
        "verifiers.mine",
        "evaluation",
    ]
    run_all(workspace, recipe_file, changed, *overrides, until="evaluation")
    [reason] = planned(workspace, recipe_file, changed, *overrides)["evaluation"].reasons
    assert re.fullmatch(r"configuration\.judge\.verifier: [0-9a-f]{12} → [0-9a-f]{12}", reason)


def test_a_renamed_verifier_changes_nothing_for_its_readers(workspace: Workspace, recipe_file: Path) -> None:
    def overrides(name: str) -> tuple[str, ...]:
        source = COMPARISON.replace("mine", name)
        return (source, f"stages.evaluation.judge.verifier={name}", *answered(recipe_file))

    run_all(workspace, recipe_file, *overrides("mine"))
    steps = planned(workspace, recipe_file, *overrides("yours"))
    assert "verifiers.yours" in steps
    assert set(actions(steps, list(steps))) == {"reuse"}


def test_prompts_are_prepared_anew_for_who_may_ask_for_answers_and_are_the_same_without_any(
    workspace: Workspace, recipe_file: Path
) -> None:
    run_all(workspace, recipe_file, *answered(recipe_file))
    before = len(events(workspace))
    overrides = (COMPARISON, VERIFIED[1], *answered(recipe_file))
    steps = planned(workspace, recipe_file, *overrides)
    assert steps["data.prompts"].reasons == ("extra.answers: absent → true",)
    assert steps["data.demonstrations"].action == "reuse"
    run_all(workspace, recipe_file, *overrides)
    finished = [line.split()[0] for line in events(workspace)[before:] if " finished " in line]
    assert finished == ["data.prompts", "verifiers.mine", "evaluation"]


@pytest.mark.slow
def test_a_verifiers_file_that_has_gone_is_an_error_that_names_it(
    workspace: Workspace, recipe_file: Path
) -> None:
    """As with data, finished artifacts stay in the store and in `vantage status`, but a plan has to read the file."""
    file = recipe_file.with_name("mine.py")
    file.write_text("def verify(prompt, response, answer):\n    return True\n")
    overrides = (*VERIFIED, f"verifiers={{mine: {{source: {file}}}}}")
    run_all(workspace, recipe_file, *overrides)
    recipe, _ = load_resolved(str(recipe_file), overrides)
    content = file.read_text()
    file.unlink()
    with pytest.raises(
        RecipeError, match=r"verifiers.mine.source: there is no file .*mine\.py; correct the path"
    ):
        load_resolved(recipe_file, overrides)[0]
    with pytest.raises(FileNotFoundError, match=r"mine\.py"):
        plan(recipe, None, [])
    file.write_text(content)
    steps = planned(workspace, recipe_file, *overrides)
    assert set(actions(steps, list(steps))) == {"reuse"}


def test_an_interrupted_stage_is_resumed_at_its_checkpoint(workspace: Workspace, recipe_file: Path) -> None:
    pace(workspace, 0.4)
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="sft")
        orchestrator.watcher.progressed = lambda step, report: (
            orchestrator.stop.set() if report.step >= 5 else None
        )  # type: ignore[method-assign]
        assert attempt(orchestrator, "sft").status == "resumable"
        saved_at = int(
            str(orchestrator.run.record.stages["sft"].reason).split("after step ")[1].split(";")[0]
        )
    step = planned(workspace, recipe_file)["sft"]
    assert (step.action, step.at_step) == ("resume", saved_at)
    assert step.label == f"resume at {saved_at}"
    assert step.reasons == ("attempt 1 was interrupted",)


def test_a_stage_that_failed_says_so(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="sft")
        orchestrator.stage_function = "tests.support.fake_work.refuse"
        attempt(orchestrator, "sft")
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
    check_drift(list(steps.values()))

    monkeypatch.setattr("vantage.runs.planning.provenance", lambda kind, **_: {"torch": "9.0"})
    steps = planned(workspace, recipe_file)
    assert steps["sft"].action == "reuse"
    assert [difference.split(" → ")[1] for difference in steps["sft"].drift] == ["9.0"]
    with pytest.raises(DriftError, match=r"sft: torch: 2\..* → 9\.0.*run without --strict"):
        check_drift(list(steps.values()))


def test_a_source_that_has_gone_is_an_error_that_names_it(workspace: Workspace, recipe_file: Path) -> None:
    rows = recipe_file.with_name("rows.jsonl")
    rows.write_text("{}\n")
    recipe = load_resolved(recipe_file, [f"data.demonstrations.source={rows}"])[0]
    rows.unlink()
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
        plan(recipe, None, [])


def test_what_another_run_computes_is_not_called_interrupted(workspace: Workspace, recipe_file: Path) -> None:
    """The checkpoints of a stage under way are there, like those of a killed one."""
    run_all(workspace, recipe_file, until="sft")
    key = planned(workspace, recipe_file)["sft"].stage_key or ""
    store = Store(workspace.store)
    write_committed(store.scratch_folder(key), step=4, journal_offset=0)
    before = planned(workspace, recipe_file)["sft"]
    assert (before.action, before.at_step) == ("resume", 4)
    with store.exclusive(key, holder="run 0007-other-abcdef"):
        step = planned(workspace, recipe_file)["sft"]
        held = store.holder_of(key)
    assert (step.action, step.at_step) == ("run", None)
    assert step.reasons[0].startswith("being computed by run 0007-other-abcdef (process ")
    assert held is not None and held in step.reasons[0]
    assert store.holder_of(key) is None
    assert planned(workspace, recipe_file)["sft"] == before
