"""Sweeps: the statistics equal hand-worked ones, and a real Prefect server orders whole sweeps of fake stages."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.fixtures import RECIPE
from tests.support.fork_server import WITH_BOTH, WITH_PREFECT
from tests.support.orchestrated import events, pace
from tests.support.real_runs import FORKED_VANTAGE, environment_of_forks
from tests.support.unsent import VARIABLE
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.jobs import key_parts_of
from vantage.attempts.machine import Machine
from vantage.cli.main import app
from vantage.flows.sweeps.report import (
    Row,
    compare,
    interval,
    plot,
    rows_csv,
    sharing,
    sharing_lines,
    table_csv,
    table_markdown,
    verdict,
)
from vantage.flows.sweeps.sweep import (
    SweepError,
    SweepResult,
    cells_at_once,
    run_sweep,
)
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.console import Screen
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.schemas.sweep import (
    Measure,
    Published,
    Sweep,
    load_sweep,
)
from vantage.storage.store import Store

ROOT = Path(__file__).parents[3]

SWEEP = """\
sweep: parts
recipe: fake.yaml
set: {stages.policy.resources.cpus: 1, stages.evaluation.resources.cpus: 1}
seeds: [1, 2]
reseeds: [policy, evaluation]
baseline: vapo
measure: {stage: evaluation, metric: accuracy}
arms:
  vapo: {}
  plain: {stages.policy.algorithm: ppo_vapo_baseline}
"""

# -- the statistics

# With two degrees of freedom the quantile has a closed form: t(p) = (2p − 1)/√(2p(1 − p)) = 0.95/√0.04875.
T_2 = 0.95 / math.sqrt(0.04875)


@pytest.mark.parametrize(
    "differences, centre, margin",
    [
        ([1.0, 2.0, 3.0], 2.0, T_2 / math.sqrt(3)),  # s² = (1 + 0 + 1)/2 = 1
        ([2.0, 3.0, 4.0], 3.0, T_2 / math.sqrt(3)),
        ([0.5, -0.1, -0.1], 0.1, T_2 * math.sqrt(0.12) / math.sqrt(3)),  # s² = (0.16 + 0.04 + 0.04)/2
        ([1.0, 3.0], 2.0, math.tan(0.475 * math.pi)),  # one degree: t(p) = tan(π(p − ½)), s/√2 = 1
        ([0.25, 0.25, 0.25], 0.25, 0.0),
    ],
)
def test_the_interval_is_students(differences: list[float], centre: float, margin: float) -> None:
    assert interval(differences) == pytest.approx((centre, centre - margin, centre + margin))


@pytest.mark.parametrize("count", [1, 4])
def test_corrected_intervals_hold_together(count: int) -> None:
    """The interval has t at p = 1 − 0.025/m, which for two degrees of freedom is (2p − 1)/√(2p(1 − p))."""
    p = 1 - 0.025 / count
    margin = (2 * p - 1) / math.sqrt(2 * p * (1 - p)) / math.sqrt(3)
    assert interval([1.0, 2.0, 3.0], comparisons=count) == pytest.approx((2.0, 2.0 - margin, 2.0 + margin))


def test_a_sweep_corrects_for_its_arms_and_measures() -> None:
    """Three arms and two measures make four comparisons with the baseline. The table's text gives this number."""
    plain = sweep_of("a", "b", "c")
    assert plain.comparisons == 1 and "correct" not in plain.model_dump()
    other = Measure(stage="policy", metric="test_score")
    corrected = plain.model_copy(update={"correct": "bonferroni", "measure": (*plain.measure, other)})
    assert corrected.comparisons == 4
    rows = [
        Row(
            arm,
            seed,
            "completed",
            {"policy.score": value, "policy.test_score": value},
            1.0,
            None,
            None,
            0,
            "",
        )
        for arm, values in {"a": (0.0, 0.0, 0.0), "b": (1.0, 2.0, 3.0)}.items()
        for seed, value in enumerate(values, start=1)
    ]
    found = {(line.measure, line.arm): (line.low, line.high) for line in compare(corrected, rows)}
    assert found["policy.score", "b"] == interval([1.0, 2.0, 3.0], comparisons=4)[1:]
    assert "corrected for 4 comparisons (Bonferroni)" in table_markdown(
        corrected, rows, compare(corrected, rows), {}
    )
    assert "not corrected for the number of arms" in table_markdown(plain, [], compare(plain, []), {})


def test_one_pair_has_no_interval() -> None:
    assert interval([0.5]) == (0.5, None, None)
    assert interval([]) == (None, None, None)


@pytest.mark.parametrize(
    "low, high, better, said",
    [
        (0.1, 0.2, "higher", "better"),
        (-0.2, -0.1, "higher", "worse"),
        (0.1, 0.2, "lower", "worse"),
        (-0.2, -0.1, "lower", "better"),
        (-0.1, 0.2, "higher", "inconclusive"),
        (0.0, 0.2, "higher", "inconclusive"),
        (0.0, 0.0, "higher", "inconclusive"),
        (None, None, "higher", "inconclusive"),
    ],
)
def test_an_interval_that_contains_zero_decides_nothing(
    low: float | None, high: float | None, better: str, said: str
) -> None:
    assert verdict(low, high, better=better) == said


def sweep_of(*arms: str, better: str = "higher") -> Sweep:
    return Sweep(
        sweep="s",
        recipe="r",
        seeds=(1, 2, 3),
        reseeds=("policy",),
        baseline=arms[0],
        measure=(Measure(stage="policy", metric="score", better=better),),  # type: ignore[arg-type]
        arms={arm: {} for arm in arms},
        published=Published(
            source="arXiv 0000.00000, table 1", unit="points", values={arms[0]: 60.0, arms[1]: 11.0}
        ),
    )


def row(arm: str, seed: int, value: float | None, status: str = "completed", reason: str = "") -> Row:
    return Row(arm, seed, status, {"policy.score": value}, 1.5, f"run-{arm}-{seed}", None, 0, reason)


def test_arms_are_compared_seed_by_seed() -> None:
    # b − a: seed 1: 4 − 1 = 3, seed 3: 9 − 4 = 5; seed 2 has no pair. Mean 4, s = √2, margin t₁·√2/√2 = t₁.
    # c − a: 1 − 1 = 0, the only pair.
    rows = [
        row("a", 1, 1.0),
        row("a", 2, 3.0),
        row("a", 3, 4.0),
        row("b", 1, 4.0),
        row("b", 2, None, "failed", "sft: x"),
    ]
    rows += [row("b", 3, 9.0), row("c", 1, 1.0)]
    a, b, c = compare(sweep_of("a", "b", "c"), rows)
    t_1 = math.tan(0.475 * math.pi)
    assert (a.n, a.mean, a.pairs, a.difference, a.verdict) == (
        3,
        pytest.approx(8 / 3),
        None,
        None,
        "baseline",
    )
    assert a.sd == pytest.approx(math.sqrt((25 / 9 + 1 / 9 + 16 / 9) / 2))
    assert (b.n, b.mean, b.pairs, b.difference) == (2, 6.5, 2, 4.0)
    assert (b.low, b.high, b.verdict) == (pytest.approx(4 - t_1), pytest.approx(4 + t_1), "inconclusive")
    assert (b.published, b.published_difference) == (11.0, -49.0)
    assert (c.n, c.sd, c.pairs, c.difference, c.low, c.verdict) == (1, None, 1, 0.0, None, "inconclusive")
    assert (c.published, c.published_difference) == (None, None)


def test_lower_can_be_better() -> None:
    rows = [row("a", seed, 5.0) for seed in (1, 2, 3)] + [
        row("b", seed, 3.0 + seed / 10) for seed in (1, 2, 3)
    ]
    assert [line.verdict for line in compare(sweep_of("a", "b", better="lower"), rows)] == [
        "baseline",
        "better",
    ]
    assert [line.verdict for line in compare(sweep_of("a", "b"), rows)] == ["baseline", "worse"]


def test_the_tables_say_what_is_missing_and_what_was_published(tmp_path: Path) -> None:
    sweep = sweep_of("a", "b")
    rows = [
        row("a", 1, 1.0),
        row("a", 2, 2.0),
        row("b", 1, 4.0),
        row("b", 2, None, "gate_closed", "value: gate closed"),
    ]
    table = compare(sweep, rows)
    text = table_markdown(sweep, rows, table, {"sft": (1, 4), "policy": (4, 4)})
    assert "4 of 6 runs have ended." in text
    assert "| b | 1 | 4 |  | +3 |  | inconclusive | 11 | -49 |" in text
    assert "- sft: trained once, reused 3 times" in text
    assert "- b, seed 2: gate closed: value: gate closed" in text
    assert "Published: points, arXiv 0000.00000, table 1." in text

    read = list(csv.DictReader(io.StringIO(rows_csv(sweep, rows))))
    assert read[0] == {
        "arm": "a", "seed": "1", "status": "completed", "policy.score": "1.0", "seconds": "1.5",
        "run_id": "run-a-1", "mlflow_run_id": "", "reason": "",
    }  # fmt: skip
    assert read[3]["policy.score"] == ""
    lines = list(csv.DictReader(io.StringIO(table_csv(table))))
    assert [(line["arm"], line["n"], line["difference"]) for line in lines] == [
        ("a", "2", ""),
        ("b", "1", "3.0"),
    ]

    plot(sweep, rows, table, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_sharing_is_counted_by_what_runs_have() -> None:
    runs = [{"sft": "s", "value": "v", "policy": str(i)} for i in range(45)]
    runs[0]["value"] = "w"
    shared = sharing(runs)
    assert shared == {"sft": (1, 45), "value": (2, 45), "policy": (45, 45)}
    assert sharing_lines(shared) == [
        "sft: trained once, reused 44 times",
        "value: trained twice, reused 43 times",
    ]


# -- what runs


@pytest.fixture
def sweep_file(recipe_file: Path) -> Path:
    """Return a small sweep beside the small recipe."""
    path = recipe_file.with_name("parts.yaml")
    path.write_text(SWEEP)
    return path


def symbolic_keys(recipe: ResolvedRecipe) -> dict[str, str]:
    """Return step → key, as if every artifact's digest were the key that it was made under."""
    keys: dict[str, str] = {}
    for step in ordered_steps(recipe):
        inputs = {role: keys[read] for role, read in dependencies(recipe)[step].items()}
        keys[step] = stage_key(key_parts_of(recipe, step, inputs))
    return keys


def test_keys_differ_exactly_where_a_seed_or_an_arm_reaches(sweep_file: Path) -> None:
    keys = {cell.name: symbolic_keys(cell.recipe) for cell in load_sweep(sweep_file).cells()}
    made = {step: len({each[step] for each in keys.values()}) for step in keys["vapo · 1"]}
    assert made == {
        "model": 1, "data.demonstrations": 1, "data.preferences": 1, "data.prompts": 1,
        "sft": 1, "reward": 1, "value": 1, "policy": 4, "evaluation": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "cpus, gpus, resources, at_once",
    [
        (2, 0, "{cpus: 1}", 2),
        (2, 0, "{}", 1),
        (16, 0, "{cpus: 3}", 5),
        (16, 1, "{cpus: 4}", 1),
        (16, 1, "{cpus: 4, gpus: 0}", 4),
        (16, 8, "{cpus: 4, gpus: 2}", 4),
        (16, 8, "{cpus: 2, gpus: 2}", 4),
    ],
)
def test_as_many_runs_as_there_is_room_for_what_a_seed_reaches(
    sweep_file: Path, cpus: int, gpus: int, resources: str, at_once: int
) -> None:
    text = SWEEP.replace(
        "{stages.policy.resources.cpus: 1, stages.evaluation.resources.cpus: 1}",
        f"{{stages.policy.resources: {resources}, stages.sft.resources: {{cpus: 1, gpus: 0}}}}",
    )
    sweep_file.write_text(text)
    machine = Machine(cpus=cpus, gpus=tuple(map(str, range(gpus))))
    assert cells_at_once(machine, load_sweep(sweep_file)) == at_once


def test_more_gpus_than_there_are_is_refused_with_the_arm(sweep_file: Path) -> None:
    swept = load_sweep(sweep_file, ["stages.policy.resources.gpus=9"])
    with pytest.raises(
        ValueError, match=r"arm vapo: stages.policy.resources.gpus=9 is more than this machine's 0"
    ):
        cells_at_once(Machine(cpus=2), swept)


def sweep_here(workspace: Workspace, file: Path, *overrides: str) -> tuple[SweepResult, str]:
    """Do what ``vantage sweep`` does, in this process; return what it printed."""
    printed = io.StringIO()
    end = run_sweep(
        load_sweep(file, overrides),
        workspace,
        Screen(Console(file=printed, width=200)),
        source=str(file),
        stage_function="tests.support.fake_sweep.run_stage",
    )
    return end, printed.getvalue()


class Swept(NamedTuple):
    """A sweep that ran from nothing to its end."""

    workspace: Workspace
    file: Path
    end: SweepResult
    printed: str


@pytest.fixture(scope="module")
def swept(ledger_database: str, prefect_url: str, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Return a sweep of fake stages, made once; what is added to its workspace must leave its runs as they are."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "fake.yaml").write_text(RECIPE)
    file = folder / "parts.yaml"
    file.write_text(SWEEP)
    workspace = Workspace(folder / "workspace")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_TRACKING_URI", ledger_database)
        return Swept(workspace, file, *sweep_here(workspace, file))


def wrong_by_an_audit(workspace: Workspace) -> list[str]:
    """Return what an audit of each run finds wrong: also the links between the runs and their sweep in MLflow."""
    found = []
    for record in read_runs(workspace):
        with Evidence(workspace) as evidence:
            report = audit(evidence, record.run_id)
        found += [f"{where}: {check}" for where, check in report.every_check() if check.outcome == "wrong"]
    return found


def started(workspace: Workspace) -> Counter[str]:
    """Return stage → number of its computations that began."""
    return Counter(line.split()[0] for line in events(workspace) if " started " in line)


def accuracies(workspace: Workspace) -> dict[tuple[str, int], float]:
    """Return (preset, seed) → accuracy, from the store: the artifact of each evaluation, by the keys in the run
    records.
    """
    store, found = Store(workspace.store), {}
    for record in read_runs(workspace):
        stage = record.recipe.stages["policy"]
        ref = store.inspect(record.stages["evaluation"].stage_key or "").ref
        if ref is not None:
            found[stage.algorithm.preset, stage.seed] = ref.artifact.metrics["accuracy"]  # type: ignore[union-attr]
    return found  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url", "workspace")
def test_a_sweep_trains_what_is_shared_once_and_its_table_is_that_of_the_store(swept: Swept) -> None:
    workspace, sweep_file, end, printed = swept
    assert end.exit_code == ExitCode.OK
    assert started(workspace) == {
        "model": 1, "data.demonstrations": 1, "data.preferences": 1, "data.prompts": 1,
        "sft": 1, "reward": 1, "value": 1, "policy": 4, "evaluation": 4,
    }  # fmt: skip
    assert "sft, reward, value: trained once, reused 3 times" in printed

    measured = accuracies(workspace)
    vapo = [measured["vapo", seed] for seed in (1, 2)]
    plain = [measured["ppo_vapo_baseline", seed] for seed in (1, 2)]
    ours, theirs = end.table
    assert (ours.mean, theirs.mean) == (pytest.approx(mean(vapo)), pytest.approx(mean(plain)))
    differences = [b - a for a, b in zip(vapo, plain, strict=True)]
    margin = (
        math.tan(0.475 * math.pi) * abs(differences[0] - differences[1]) / 2
    )  # s/√2 of two is half their distance
    assert theirs.difference == pytest.approx(mean(differences))
    assert (theirs.low, theirs.high) == (
        pytest.approx(mean(differences) - margin),
        pytest.approx(mean(differences) + margin),
    )

    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("fake")
    assert experiment is not None
    [parent] = client.search_runs([experiment.experiment_id], f"tags.`vantage.sweep` = '{end.sweep_id}'")
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["evaluation.accuracy.plain.difference"] == pytest.approx(mean(differences))
    files = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert files == {"plot.png", "rows.csv", "sweep.json", "table.csv", "table.md"}
    for each in end.rows:
        run = client.get_run(parent.data.tags[f"vantage.cell.{each.arm}.{each.seed}"])
        assert run.data.tags["vantage.run_id"] == each.run_id
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert (run.data.tags["vantage.arm"], run.data.tags["vantage.seed"]) == (each.arm, str(each.seed))

    # The same command again starts nothing: no computation, no run, no Prefect.
    runs = len(read_runs(workspace))
    again, printed = sweep_here(workspace, sweep_file)
    assert "4 runs, 4 done" in printed
    assert "Prefect" not in printed
    assert (again.rows, again.table, again.shared) == (end.rows, end.table, end.shared)
    assert (len(read_runs(workspace)), started(workspace)["policy"]) == (runs, 4)

    # A gate that is judged anew makes new runs, of which everything is reused: no Prefect either.
    tightened, printed = sweep_here(workspace, sweep_file, "stages.evaluation.gate.at_least=0.05")
    assert "Prefect" not in printed
    assert (tightened.exit_code, len(read_runs(workspace))) == (ExitCode.OK, runs + 4)
    assert [line.mean for line in tightened.table] == [line.mean for line in end.table]
    assert wrong_by_an_audit(workspace) == []


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_runs_that_differ_are_computed_side_by_side(
    workspace: Workspace, sweep_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shared stages take the whole machine, as by default; to reuse them while another run computes must not.
    monkeypatch.setattr("vantage.flows.sweeps.sweep.this_machine", lambda: Machine(cpus=2))
    workspace.root.mkdir()
    (workspace.root / "meet.txt").touch()
    sweep_file.write_text(SWEEP.replace("seeds: [1, 2]", "seeds: [1]"))
    end, printed = sweep_here(workspace, sweep_file)
    assert end.exit_code == ExitCode.OK, printed
    assert "up to 2 at once" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_a_run_that_fails_or_closes_a_gate_is_a_row_and_the_others_go_on(
    workspace: Workspace, sweep_file: Path
) -> None:
    text = SWEEP.replace("seeds: [1, 2]", "seeds: [1]")
    text += "  broken: {stages.policy.iterations: 13}\n"  # the fake stages refuse that number
    text += "  gated: {stages.policy.iterations: 14, stages.evaluation.gate.at_least: 0.9}\n"
    sweep_file.write_text(text)
    end, _ = sweep_here(workspace, sweep_file)
    rows = {each.arm: each for each in end.rows}
    assert {arm: each.status for arm, each in rows.items()} == {
        "vapo": "completed", "plain": "completed", "broken": "failed", "gated": "gate_closed",
    }  # fmt: skip
    assert rows["broken"].values == {"evaluation.accuracy": None}
    assert "13 iterations bring bad luck" in rows["broken"].reason
    assert rows["gated"].values["evaluation.accuracy"] is not None, (
        "what was measured counts, whatever a gate says"
    )
    assert "gate accuracy_gain 0.100 >= 0.9: CLOSED" in rows["gated"].reason
    assert end.exit_code == ExitCode.BAD_INPUT, "of a failure and a closed gate, the failure"
    assert [line.n for line in end.table] == [1, 1, 0, 1]
    assert "broken, seed 1: failed" in (end.folder / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
def test_a_shared_stage_that_fails_is_not_tried_again_by_every_run(
    workspace: Workspace, sweep_file: Path
) -> None:
    workspace.root.mkdir()
    (workspace.root / "refuse.txt").write_text("sft")
    end, _ = sweep_here(workspace, sweep_file)
    assert started(workspace)["sft"] == 1
    assert [each.status for each in end.rows] == ["failed"] * 4
    assert "row 7 has no prompt" in end.rows[0].reason
    assert {each.reason for each in end.rows[1:]} == {"sft has failed in vapo · 1"}
    assert end.exit_code == ExitCode.BAD_INPUT

    (workspace.root / "refuse.txt").unlink()
    end, _ = sweep_here(workspace, sweep_file)
    assert (end.exit_code, [each.status for each in end.rows]) == (ExitCode.OK, ["completed"] * 4)


def test_a_sweep_is_driven_by_one_process_at_a_time(workspace: Workspace, sweep_file: Path) -> None:
    from vantage.flows.sweeps.sweep import _sweep_lock
    from vantage.runs.resolving import resolve_sweep

    swept = resolve_sweep(load_sweep(sweep_file))
    with (
        _sweep_lock(workspace.root / "sweeps" / f"parts-{swept.digest[:6]}"),
        pytest.raises(SweepError, match="is being driven by another process"),
    ):
        sweep_here(workspace, sweep_file)


def vantage(*arguments: str | Path) -> subprocess.Popen[str]:
    return WITH_PREFECT.popen(
        [sys.executable, "-m", "tests.support.fake_sweep", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_url")
@pytest.mark.parametrize(
    "number, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, ExitCode.RESUME)]
)
def test_an_interrupted_sweep_goes_on_by_the_same_command(
    workspace: Workspace, sweep_file: Path, number: signal.Signals, code: int, swept: Swept
) -> None:
    pace(workspace, 0.1)  # twelve steps a stage
    options = ["sweep", sweep_file, "--workspace", workspace.root, "--json"]
    victim = vantage(*options)
    try:
        deadline = time.monotonic() + 300
        while started(workspace)["policy"] < 2 and time.monotonic() < deadline and victim.poll() is None:
            time.sleep(0.02)
        assert started(workspace)["policy"] == 2, "in the middle of a sweep"
        os.killpg(victim.pid, number)
        _, told = victim.communicate(timeout=300)
    finally:
        if victim.poll() is None:
            os.killpg(victim.pid, signal.SIGKILL)
            victim.wait()
    assert victim.returncode == code, told

    pace(workspace, 0.0)
    resumed = vantage(*options)
    out, told = resumed.communicate(timeout=300)
    assert resumed.returncode == ExitCode.OK, told
    report = json.loads(out.splitlines()[-1])
    assert [each["status"] for each in report["rows"]] == ["completed"] * 4
    assert report["shared"]["sft"] == {"artifacts": 1, "runs": 4}
    assert started(workspace)["sft"] == started(workspace)["value"] == 1
    assert len(read_runs(workspace)) == 4, "an interrupted run is gone on with"

    assert [each["values"] for each in report["rows"]] == [each.values for each in swept.end.rows], (
        "bit by bit"
    )


REAL = """\
sweep: real
recipe: quickstart
seeds: [1, 2]
reseeds: [policy, evaluation]
baseline: vapo
measure:
  - {stage: policy, metric: validation_score}
  - {stage: evaluation, metric: mean_response_length, better: lower}
arms:
  vapo: {}
  plain: {stages.policy.algorithm: {preset: ppo_vapo_baseline, samples_per_prompt: 4}}
set:
  generation.max_response_tokens: 20
  data.demonstrations.rows: 240
  data.preferences: {source: "builtin:arithmetic_habit/preferences", rows: 240, max_dropped: 0.5}
  data.prompts: {source: "builtin:arithmetic_habit/prompts", rows: 100, split: {validation: 16, test: 16}}
  stages.sft.epochs: 0.5
  stages.sft.batch_size: 8
  stages.reward.epochs: 0.25
  stages.reward.gate.at_least: 0.0
  stages.value.iterations: 2
  stages.value.batch_size: 16
  stages.value.minibatch_size: 8
  stages.value.validation_samples: 16
  stages.value.gate.at_least: -1000
  stages.policy.iterations: 4
  stages.policy.learning_rate: 1e-3
  stages.policy.batch_size: 16
  stages.policy.minibatch_size: 8
  stages.policy.validation_samples: 16
  stages.policy.checkpoint_every: 1
  stages.policy.resources.cpus: 1
  stages.evaluation.resources.cpus: 1
  stages.evaluation.gate.at_least: -1
"""
"""The quickstart cut very small; gates are set so that they pass: nothing is learnt here."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_url")
def test_a_real_sweep_is_killed_and_resumed_and_its_table_is_that_of_mlflow(
    workspace: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "real.yaml").write_text(REAL)
    command = [*FORKED_VANTAGE, "sweep", str(tmp_path / "real.yaml"), "--json"]
    command += ["--workspace", str(workspace.root)]
    victim = WITH_BOTH.popen(
        command, env=environment_of_forks(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert victim.stderr is not None
    for line in victim.stderr:  # in the middle: one run is over, others are on their way
        if "1/4" in line and "policy.validation_score" in line:
            break
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert "policy.validation_score" in line

    resumed = WITH_BOTH.run(command, env=environment_of_forks(), timeout=600)
    assert resumed.returncode == ExitCode.OK, resumed.stderr
    assert "0 done" not in resumed.stderr
    assert "sft, reward, value: trained once, reused 3 times" in resumed.stderr
    report = json.loads(resumed.stdout.splitlines()[-1])
    stages = [(name, stage) for record in read_runs(workspace) for name, stage in record.stages.items()]
    # the killed run that made a stage finds it again, and then has it "reused" with the attempt that made it
    made = Counter(name for name, stage in stages if stage.attempt is not None)
    assert (made["sft"], made["reward"], made["value"]) == (1, 1, 1)
    assert len({stage.stage_key for name, stage in stages if name == "policy"}) == 4

    # Read the numbers that each run's own stages sent to MLflow, and work the table out from them again.
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    assert wrong_by_an_audit(workspace) == []
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment is not None
    told: dict[tuple[str, str, int], float] = {}
    for row in report["rows"]:
        for name in ("policy.validation_score", "evaluation.mean_response_length"):
            stage, metric = name.split(".")
            where = f"tags.`vantage.run_id` = '{row['run_id']}' AND tags.`vantage.stage` = '{stage}'"
            [run] = client.search_runs([experiment.experiment_id], where)
            told[name, row["arm"], row["seed"]] = run.data.metrics[metric]
    assert len(set(told.values())) > 4, "arms and seeds differ"
    for line in report["table"]:
        own, base = ([told[line["measure"], arm, seed] for seed in (1, 2)] for arm in (line["arm"], "vapo"))
        assert line["mean"] == pytest.approx(mean(own))
        if line["arm"] != "vapo":
            first, second = own[0] - base[0], own[1] - base[1]
            margin = math.tan(0.475 * math.pi) * abs(first - second) / 2
            assert line["difference"] == pytest.approx((first + second) / 2)
            assert (line["low"], line["high"]) == (
                pytest.approx((first + second) / 2 - margin),
                pytest.approx((first + second) / 2 + margin),
            )


def test_the_command_line_refuses_a_sweep_with_all_its_mistakes(sweep_file: Path, tmp_path: Path) -> None:
    sweep_file.write_text(SWEEP.replace("baseline: vapo", "baseline: vap").replace("accuracy", "acuracy"))
    done = CliRunner().invoke(
        app, ["sweep", str(sweep_file), "--workspace", str(tmp_path / "w"), "--seeds", "1,9"]
    )
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "parts.yaml:6: baseline: 'vap' is not an arm; did you mean 'vapo'?" in done.stderr
    assert "--seeds: '9' is not among the sweep's; use some of: 1, 2" in done.stderr
    assert not (tmp_path / "w").exists()
