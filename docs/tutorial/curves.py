"""Draw healthy and sick curves of the trials of the guards: `python docs/tutorial/curves.py` writes curves.svg beside this file.

The values are those of docs/guard_trials/curves.csv; its page describes the runs.
"""

import csv
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
TABLE, FIGURE = HERE.parent / "guard_trials" / "curves.csv", HERE / "curves.svg"
PANELS = {
    "validation_score": "reward on validation prompts",
    "validation_watch_score": "share of right answers on the same prompts",
    "kl_to_reference": "KL to the SFT policy, nats per response",
    "reference_nll": "log-perplexity under the SFT policy, nats per token",
    "validation_score_drift": "drift of the rewards, standard deviations",
    "explained_variance": "explained variance of the critic",
}
TRIALS = {
    "vapo": ("healthy: VAPO", "#15803d"),
    "length": ("reward for length", "#b45309"),
    "rate_x100": ("learning rate × 100", "#b91c1c"),
    "blind_critic": ("blind critic", "#6d28d9"),
}
SEED = "1"
ITERATIONS = 20
"""Iterations of a run; one later row measures the policy that was kept."""
LOGARITHMIC = ("kl_to_reference",)


def read() -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return (trial, metric) → pairs of iteration and value, of the first seed."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    with TABLE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            is_shown = (
                row["trial"] in TRIALS and row["name"] in PANELS and int(row["iteration"]) <= ITERATIONS
            )
            if row["row"] == "curve" and row["seed"] == SEED and is_shown:
                found[row["trial"], row["name"]].append((int(row["iteration"]), float(row["value"])))
    return found


def draw() -> None:
    """Draw each metric with a line for each trial."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "vantage"
    curves = read()
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    for panel, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        for trial, (label, color) in TRIALS.items():
            points = sorted(curves.get((trial, name), ()))
            if points:
                panel.plot(*zip(*points, strict=True), color=color, linewidth=1.6, label=label)
        if name in LOGARITHMIC:
            panel.set_yscale("symlog")
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("iteration", fontsize=8)
        panel.set_xticks(range(0, ITERATIONS + 1, 5))
        panel.tick_params(labelsize=8)
    axes.flat[1].legend(fontsize=7)
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    draw()
