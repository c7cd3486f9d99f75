"""Try the guards: policy stages that stay healthy, and some that collapse.

    python docs/guard_trials/trials.py run WORKSPACE [NAME …]    # makes what is missing, and writes curves.csv beside this file
    python docs/guard_trials/trials.py table                     # prints a row for each run
    python docs/guard_trials/trials.py signs                     # prints how far two curves without a judge went in each run

Every guard only warns here, so that the curves go on after a firing and show when the collapse began.
"""

import csv
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
RECIPE, TABLE = HERE / "trials.yaml", HERE / "curves.csv"
STAGE = "policy"
JUDGED = "validation_watch_score"
UNLIKELY, DRIFT = "reference_nll", "validation_score_drift"
CURVES = (
    *(JUDGED, "validation_score", "kl_to_reference", "explained_variance", UNLIKELY, DRIFT),
    *("approx_kl", "watch_change", "watch_worse", "watch_pair_accuracy", "watch_initial_pair_accuracy_low"),
)
CRITIC = ("stages.policy.critic=reward",)
ONE_STEP = ("stages.policy.minibatch_size=128",)
"""Setting of losses without a ratio, which take one step on each rollout."""
GAMEABLE = ("stages.policy.reward=gameable", "stages.policy.learning_rate=5e-4")

HEALTHY = {
    "vapo": (
        *CRITIC,
        "stages.policy.algorithm={preset: vapo, length_adaptive_alpha: 1.0, samples_per_prompt: 4}",
    ),
    "vc_ppo": (*CRITIC, "stages.policy.algorithm={preset: vc_ppo}"),
    "ppo": (*CRITIC, "stages.policy.algorithm={preset: ppo}"),
    "evpo": (*CRITIC, "stages.policy.algorithm={preset: evpo}"),
    "a2c": (*CRITIC, *ONE_STEP, "stages.policy.algorithm={preset: a2c}"),
    "grpo": ("stages.policy.algorithm={preset: grpo, samples_per_prompt: 8}",),
    "dr_grpo": ("stages.policy.algorithm={preset: dr_grpo, samples_per_prompt: 8}",),
    "rloo": (
        *ONE_STEP,
        "stages.policy.algorithm={preset: rloo}",
    ),
    "reinforce_pp": ("stages.policy.algorithm={preset: reinforce_pp}",),
    "remax": (
        *ONE_STEP,
        "stages.policy.algorithm={preset: remax}",
    ),
}
"""Preset → what it changes in the recipe. The reward is the trained reward model."""
COLLAPSES = {
    "length": (*GAMEABLE, "verifiers.trial.function=length"),
    "one_token": (*GAMEABLE, "verifiers.trial.function=one_token"),
    "repetition": (*GAMEABLE, "verifiers.trial.function=repetition"),
    "copied_prompt": (*GAMEABLE, "verifiers.trial.function=copied_prompt"),
    "noise": (*GAMEABLE, "verifiers.trial.function=noise"),
    "wrong": (*GAMEABLE, "verifiers.trial.function=wrong"),
    "rate_x100": ("stages.policy.learning_rate=2e-2",),
    "blind_critic": (*HEALTHY["ppo"], "stages.policy.critic_learning_rate=0.1"),
}
"""Kind of collapse → what it changes in the recipe."""


@dataclass(frozen=True)
class Trial:
    """One run of the recipe."""

    name: str
    seed: int
    changes: tuple[str, ...]


TRIALS = [
    *(Trial(name, seed, changes) for seed in (1, 2) for name, changes in HEALTHY.items()),
    *(Trial(name, seed, changes) for seed in (1, 2, 3) for name, changes in COLLAPSES.items()),
]


def run(workspace: str, *names: str) -> None:
    """Run each trial that has no rows yet, and add its rows."""
    done = {(row["trial"], int(row["seed"])) for row in recorded_rows() if row["name"] == JUDGED}
    for trial in TRIALS:
        if (trial.name, trial.seed) in done or (names and trial.name not in names):
            continue
        settings = [f"stages.policy.seed={trial.seed}", *trial.changes]
        command = ["vantage", "run", str(RECIPE), "--workspace", workspace]
        subprocess.run(
            [*command, *(f"--set={each}" for each in settings)], stdout=subprocess.DEVNULL, check=True
        )
        record = max(
            Path(workspace).glob("runs/*-guard_trials-*/run.json"), key=lambda path: path.parent.name
        )
        _add(trial, workspace, json.loads(record.read_text()))


def _add(trial: Trial, workspace: str, record: dict[str, Any]) -> None:
    """Write the curves of a run, and at which iterations its guards fired, behind the others'."""
    from mlflow import MlflowClient

    from vantage.schemas.records.firings import Firing

    client = MlflowClient(f"sqlite:///{Path(workspace).absolute()}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    asked = f"tags.`vantage.run_id` = '{record['run_id']}' and tags.`vantage.stage` = '{STAGE}'"
    [found] = client.search_runs(experiments, asked)
    rows = [
        (trial.name, trial.seed, "curve", name, point.step, f"{point.value:.6g}")
        for name in CURVES
        for point in client.get_metric_history(found.info.run_id, name)
    ]
    for each in record["stages"][STAGE].get("firings", ()):
        firing = Firing.model_validate(each)
        rows.append(
            (
                trial.name,
                trial.seed,
                "firing",
                firing.guard.condition,
                firing.step,
                f"{firing.values[-1]:.6g}",
            )
        )
    is_new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(("trial", "seed", "row", "name", "iteration", "value"))
        writer.writerows(rows)


def recorded_rows() -> list[dict[str, str]]:
    """Return the rows of ``curves.csv``."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> None:
    """Print a row for each trial: the judge's best and last score, and at which iteration each guard fired first."""
    curves: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    first: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for row in recorded_rows():
        key = row["trial"], int(row["seed"])
        if row["row"] == "firing":
            first[key].setdefault(row["name"].partition(" ")[0].removesuffix(":"), int(row["iteration"]))
        elif row["name"] == JUDGED:
            curves[key][int(row["iteration"])] = float(row["value"])
    print("| trial | seed | judge: best | judge: last | guards, and the iteration of their first firing |")
    print("|---|---|---|---|---|")
    for key in ((trial.name, trial.seed) for trial in TRIALS):
        if key not in curves:
            continue
        *trained, kept = (score for _, score in sorted(curves[key].items()))
        fired = ", ".join(
            f"{name} {step}" for name, step in sorted(first[key].items(), key=lambda each: each[1])
        )
        print(f"| {key[0]} | {key[1]} | {kept:.3f} | {trained[-1]:.3f} | {fired or 'none'} |")


def signs() -> None:
    """Print, for each trial, how far the perplexity rose (mean of 3 reports over that of the 3 before) and the scores moved."""
    curves: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in recorded_rows():
        if row["row"] == "curve" and row["name"] in (UNLIKELY, DRIFT):
            curves[row["trial"], int(row["seed"])][row["name"]].append(float(row["value"]))
    print("| trial | seed | reference_nll: highest rise | above 0.1 from iteration | drift: highest |")
    print("|---|---|---|---|---|")
    for key in ((trial.name, trial.seed) for trial in TRIALS):
        if key not in curves:
            continue
        nlls = curves[key][UNLIKELY]
        rises = {
            end: fmean(nlls[end - 3 : end]) - fmean(nlls[end - 6 : end - 3])
            for end in range(6, len(nlls) + 1)
        }
        first = next((str(end) for end, rise in rises.items() if rise > 0.1), "never")
        print(
            f"| {key[0]} | {key[1]} | {max(rises.values()):.3f} | {first} | {max(curves[key][DRIFT]):.2f} |"
        )


if __name__ == "__main__":
    COMMANDS: dict[str, Callable[..., None]] = {"run": run, "table": table, "signs": signs}
    COMMANDS[sys.argv[1]](*sys.argv[2:])
