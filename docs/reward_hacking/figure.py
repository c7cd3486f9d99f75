"""Draw curves of a policy that hacks its reward, over several seeds.

    python docs/reward_hacking/figure.py collect WORKSPACE RUN …     # writes curves.csv beside this file
    python docs/reward_hacking/figure.py draw                        # writes curves.svg

The runs are those of docs/recipes/reward_hacking.md. A band is the 95 % interval of the mean over seeds, by Student's t.
"""

import csv
import sys
from collections import defaultdict
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev

HERE = Path(__file__).parent
TABLE, FIGURE = HERE / "curves.csv", HERE / "curves.svg"
STAGE = "unwatched"
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""Number of seeds → 97.5 % quantile of Student's t with one degree of freedom less."""
PANELS = {
    "validation_score": "reward on validation prompts",
    "validation_watch_score": "share of right answers on the same prompts",
    "kl_to_reference": "KL to the SFT policy, nats per response",
    "response_length_mean": "response length, tokens",
    "reference_nll": "log-perplexity under the SFT policy, nats per token",
    "validation_score_drift": "drift of the rewards, standard deviations",
    "watch_pair_accuracy": "reward of right against wrong answers (0.5: chance)",
    "repeated_trigrams": "repeated 3-grams",
}
BANDS = ("validation_score_p10", "validation_score_p50", "validation_score_p90")


def collect(workspace: str, *runs: str) -> None:
    """Write the curves of the stage in these runs."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{Path(workspace).absolute()}/mlflow.db")
    names = (*PANELS, *BANDS)
    experiments = [each.experiment_id for each in client.search_experiments()]
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("run", "iteration", *names))
        for number, run in enumerate(runs, start=1):
            asked = f"tags.`vantage.run_id` = '{run}' and tags.`vantage.stage` = '{STAGE}'"
            [found] = client.search_runs(experiments, asked)
            curves = {
                name: {m.step: m.value for m in client.get_metric_history(found.info.run_id, name)}
                for name in names
            }
            for step in sorted(curves["validation_score_drift"]):  # the kept policy is measured once more
                writer.writerow(
                    (number, step, *(f"{curves[name].get(step, float('nan')):.6g}" for name in names))
                )


def draw() -> None:
    """Draw the mean over seeds of each metric, with its interval."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "vantage"
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            for name in (*PANELS, *BANDS):
                if isfinite(value := float(row[name])):
                    values[name][int(row["iteration"])].append(value)
    figure, axes = plt.subplots(3, 3, figsize=(11, 8), layout="constrained")
    for panel, (name, title) in zip(axes.flat, PANELS.items(), strict=False):
        _line(panel, values[name], color="#1f5fa8")
        panel.set_title(title, fontsize=9)
    for name, label in zip(BANDS, ("10 %", "50 %", "90 %"), strict=True):
        _line(axes.flat[len(PANELS)], values[name], color="#8a4b00", label=label)
    axes.flat[len(PANELS)].set_title("percentiles of the rewards", fontsize=9)
    axes.flat[len(PANELS)].legend(fontsize=8)
    for panel in axes.flat:
        panel.set_xlabel("iteration", fontsize=8)
        panel.tick_params(labelsize=8)
    figure.savefig(FIGURE, metadata={"Date": None})


def _line(panel: object, by_step: dict[int, list[float]], *, color: str, label: str | None = None) -> None:
    steps = sorted(by_step)
    means = [fmean(by_step[step]) for step in steps]
    halves = [T_95[len(by_step[step])] * stdev(by_step[step]) / len(by_step[step]) ** 0.5 for step in steps]
    panel.plot(steps, means, color=color, linewidth=1.5, label=label)  # type: ignore[attr-defined]
    low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
    panel.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)  # type: ignore[attr-defined]


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        collect(*sys.argv[2:])
    else:
        draw()
