"""The lines that are printed after a gate has closed can be pasted, and do what they promise."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.cli.main import app
from vantage.runs.next_steps import _lower_bound, _threshold_met_by, after_closed_gates, after_parts
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.schemas.records.verdicts import check_gate

SETS = ("stages.value.gate.at_least=0.9",)


@pytest.fixture
def closed(workspace: Workspace, recipe_file: Path) -> RunRecord:
    """Return a run whose critic (0.4) did not pass its gate (0.9)."""
    with orchestrated(workspace, recipe_file, *SETS, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome(), source=str(recipe_file), overrides=SETS)
    return read_runs(workspace)[0]


def commands(lines: list[str]) -> list[list[str]]:
    """Return what follows ``vantage`` in each command."""
    return [shlex.split(line)[1:] for line in lines if line.startswith("      ")]


def test_it_names_the_fields_what_is_reused_and_what_runs_again(
    closed: RunRecord, workspace: Workspace
) -> None:
    """The lines after a closed gate name the fields to change, the reused stages and those that run again."""
    lines = after_closed_gates(closed, workspace.address)
    text = "\n".join(lines)
    assert "value did not pass explained_variance >= 0.9" in text
    assert "stages.value.iterations=100" in text
    assert "stages.value.gate.at_least" in text
    assert "stages.value.gate.on_fail" in text
    assert commands(lines)[0] == ["critic", f"{closed.run_id}/value", "--workspace", workspace.address]
    reused = "model, data.demonstrations, data.preferences, data.prompts, sft, reward are reused"
    assert f"{reused}; value, policy, evaluation run again" in text


def test_no_closed_gate_no_advice(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
    assert after_closed_gates(read_runs(workspace)[0], workspace.address) == []


def test_a_run_that_failed_was_stopped_or_was_a_part_has_commands_to_go_on(
    closed: RunRecord, workspace: Workspace
) -> None:
    place = ["--workspace", workspace.address]
    again = ["run", closed.source, "--set", SETS[0], *place]
    stages = {**closed.stages, "sft": closed.stages["sft"].model_copy(update={"status": "failed"})}
    failed = closed.model_copy(update={"status": "failed", "stages": stages})
    assert commands(after_parts(failed, workspace.address)) == [["logs", closed.run_id, "sft", *place], again]
    stopped = closed.model_copy(update={"status": "resumable"})
    assert commands(after_parts(stopped, workspace.address)) == [["resume", closed.run_id, *place]]
    part = closed.model_copy(update={"status": "completed", "part": "until sft"})
    lines = after_parts(part, workspace.address)
    assert (lines[0], commands(lines)) == (
        "The run was until sft. The rest, which reuses what is made:",
        [again],
    )
    whole = closed.model_copy(update={"status": "completed"})
    assert after_parts(whole, workspace.address) == after_parts(closed, workspace.address) == []


def planned(words: list[str]) -> dict[str, str]:
    """Return step → action of the plan of a command that would run."""
    done = CliRunner().invoke(app, ["plan", *words[1:], "--json"])
    assert done.exit_code == 0, done.stderr
    return dict(re.findall(r'"name": "([^"]+)", "kind": "[^"]+", "action": "([^"]+)"', done.stdout))


def test_each_command_does_what_it_is_said_to_do(closed: RunRecord, workspace: Workspace) -> None:
    _, otherwise, lower, asked = commands(after_closed_gates(closed, workspace.address))
    again = planned(otherwise)
    assert [step for step, action in again.items() if action != "reuse"] == ["value", "policy", "evaluation"]
    assert again["value"] == "run"
    plan = planned(lower)
    assert (plan["value"], plan["policy"]) == ("reuse", "run"), "nothing is in its way any more"
    assert planned(asked)["value"] == "reuse"
    assert "stages.value.gate.on_fail=approve" in asked


@pytest.mark.parametrize("measured", [0.172, 0.4722, 0.9964, -3.21, 12.74, 0.0, 0.1, 1e-5, 0.999])
@pytest.mark.parametrize("side", ["at_least", "at_most"])
def test_the_threshold_that_is_offered_would_be_met(measured: float, side: str) -> None:
    far = measured + 1 if side == "at_least" else measured - 1
    verdict = check_gate(Gate.model_validate({"metric": "m", side: far}), {"m": measured})
    assert not verdict.passed
    offered = float(_threshold_met_by(verdict))
    assert check_gate(Gate.model_validate({"metric": "m", side: offered}), {"m": measured}).passed
    assert abs(offered - measured) <= 0.1 * abs(measured) + 1e-9


@pytest.mark.parametrize("side", ["at_least", "at_most"])
def test_of_a_gate_with_confidence_the_bound_of_the_interval_would_meet_it(side: str) -> None:
    """A win rate of 0.583 over 35 prompts has a wide interval, so a threshold of 0.58 would not open the gate."""
    metrics, uncertainty = {"win_rate": 0.583}, {"win_rate": Uncertainty(n=35, rows=35, standard_error=0.083)}
    gate = {"metric": "win_rate", side: 0.9 if side == "at_least" else 0.1, "confidence": 0.95}
    verdict = check_gate(Gate.model_validate(gate), metrics, uncertainty)
    assert not verdict.passed
    offered = float(_threshold_met_by(verdict))
    assert check_gate(Gate.model_validate(gate | {side: offered}), metrics, uncertainty).passed


def test_of_equal_models_less_is_not_asked_for() -> None:
    """The difference of equal models is 0 by construction, so no threshold opens the gate."""
    gate = Gate.model_validate({"metric": "win_rate", "at_least": 0.6})
    verdict = check_gate(gate, {"win_rate": 0.5}, equal="policy holds the weights of sft")
    assert verdict.judged is None
    assert check_gate(gate, {"win_rate": 0.5}).judged == 0.5


@pytest.mark.parametrize(
    ("metric", "side", "bound", "measured", "error", "offered"),
    [
        ("accuracy_gain", "at_least", 0.02, -0.029, 0.01, None),
        ("accuracy_gain", "at_least", 0.02, 0.005, 0.02, None),  # the bound of the interval is below 0
        ("accuracy_gain", "at_least", 0.2, 0.1, 0.01, "positive"),
        ("accuracy_gain", "at_least", -0.01, -0.029, 0.01, None),  # a loss is allowed, and no larger one is offered
        ("score_win_rate", "at_least", 0.6, 0.45, 0.01, None),
        ("win_rate", "at_least", 0.9, 0.7, 0.01, "positive"),
        ("pair_accuracy_chosen_shorter", "at_least", 0.6, 0.4, 0.01, None),
        ("perplexity_ratio", "at_most", 0.9, 1.2, 0.01, None),
        ("response_nll_difference", "at_most", -0.1, 0.2, 0.01, None),
        ("explained_variance", "at_least", 0.1, -0.3, None, None),
        ("explained_variance", "at_least", 0.9, 0.4, None, "positive"),
        ("preference_loss", "at_most", 0.5, 0.75, 0.01, None),  # a coin has a loss of log 2
        ("preference_loss", "at_most", 0.5, 0.6, 0.01, "positive"),
        ("brier_score", "at_most", 0.2, 0.27, 0.01, None),
        ("worst_subgroup_accuracy", "at_least", 0.6, 0.4, None, None),
        ("squared_advantage_ratio", "at_most", 0.8, 1.1, None, None),
        ("score_gap", "at_least", 0.5, -0.1, None, None),
        ("value_mse", "at_most", 0.1, 0.3, None, None),  # a constant has 0.2
        ("value_mse", "at_most", 0.1, 0.15, None, "positive"),
        ("accuracy", "at_least", 0.2, 0.054, None, None),  # the baseline has 0.083
        ("accuracy", "at_least", 0.2, 0.1, None, "positive"),
        ("truncated_share", "at_most", 0.01, 0.4, None, None),
        # the metric has a scale of its own, so no value alone shows a loss
        ("mean_score", "at_least", 0.9, -0.4, None, "-0.4"),
    ],
)  # fmt: skip
def test_no_bound_is_offered_that_accepts_a_loss(
    metric: str, side: str, bound: float, measured: float, error: float | None, offered: str | None
) -> None:
    """The value without a gain is 0 for a difference and explained variance, a half for a share of wins or pairs, 1 for
    a ratio, and else what a coin, a constant or the baseline has."""
    sure = {} if error is None else {metric: Uncertainty(n=400, rows=400, standard_error=error)}
    gate = {"metric": metric, side: bound} | ({} if error is None else {"confidence": 0.95})
    verdict = check_gate(Gate.model_validate(gate), {metric: measured}, sure)
    assert not verdict.passed
    others = {"constant_mse": 0.2, "baseline_accuracy": 0.083, "baseline_truncated_share": 0.02}
    told = _lower_bound(verdict, others | {metric: measured})
    if offered == "positive":
        assert told is not None
        assert float(told) > 0
    else:
        assert told == offered
