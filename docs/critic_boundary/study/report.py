"""Draw tables and plots from the seeds' JSON files."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from docs.critic_boundary.study.arms import OTHERS, WHITE_EARLY
from docs.critic_boundary.study.critics import ORACLE, PRETRAINED, REWARD_MODEL
from docs.critic_boundary.study.summary import summary
from docs.critic_boundary.study.tables import (
    MEASURES,
    agreement_table,
    arm_table,
    crossing_table,
    part_table,
    token_table,
    whole_ratios,
    whole_table,
    with_ratios,
    write_csv,
)

Row = dict[str, Any]
TITLES = {
    "explained_variance": "explained variance",
    "explained_mse": "the same with the bias (mean squared error)",
    "explained_weighted": "the same, weighted by ‖∇ log π‖²",
}
LIMITS = (-2.6, 1.0)
"""Of the measures in the plot; what lies further out is in the CSV."""
MARKERS = {
    "critic": "o",
    "constant": "x",
    "scaled": "^",
    "shifted": "v",
    "white noise": "P",
    "response noise": "s",
    "prompt noise": "D",
    "baseline": "*",
}
SHOWN_BY_PART = (
    ("critic", REWARD_MODEL),
    ("critic", PRETRAINED),
    ("critic", ORACLE),
    (WHITE_EARLY, ORACLE),
    ("baseline", OTHERS),
)


def write_report(measured: list[Row], output: Path) -> None:
    """Write CSV and PNG of what the seeds say together, with what `all_parameters` has written to the same folder."""
    seeds = [seed["seed"] for seed in measured]
    files = [output / f"all-parameters-{seed}.json" for seed in seeds]
    tables = tables_of(measured, [json.loads(file.read_text()) for file in files if file.is_file()])
    for name, table in tables.items():
        if table:
            write_csv(output / f"{name}.csv", table)
    (output / "summary.md").write_text(summary(tables) + "\n")
    plot_ratios(output / "ratio.png", tables["arms"])
    plot_parts(output / "tokens_left.png", tables["tokens_left"])
    plot_whole(output / "all_parameters.png", tables["all_parameters"])


def tables_of(measured: list[Row], more: list[Row]) -> dict[str, list[Row]]:
    """Return every table, by the name of its file; `more` are the seeds of `all_parameters`."""
    ratios = [with_ratios(seed) for seed in measured]
    by_seed = {seed["seed"]: table for seed, table in zip(measured, ratios, strict=True)}
    whole = [whole_ratios(seed, by_seed[seed["seed"]]) for seed in more]
    fewer = [whole_ratios(seed, by_seed[seed["seed"]]) for seed in measured]
    return {
        "arms": arm_table(ratios),
        "all_parameters": whole_table(whole, fewer),
        "agreement": agreement_table(ratios, ratio="variance_ratio", measures=MEASURES),
        "agreement_all_parameters": agreement_table(
            whole, ratio="whole_ratio", measures=(*MEASURES, "whole_weighted")
        ),
        "crossings": crossing_table(ratios),
        "tokens_left": part_table(measured),
        "tokens": token_table(measured),
    }


def plot_ratios(path: Path, arms: list[Row]) -> None:
    """Plot the ratio of variances against each measure, by how the baseline was made."""
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(5.2 * len(MEASURES), 4.6), sharey=True)
    for axis, measure in zip(axes, MEASURES, strict=True):
        for number, (family, marker) in enumerate(MARKERS.items()):
            rows = [row for row in arms if row["family"] == family]
            axis.errorbar(
                [row[measure] for row in rows],
                [row["variance_ratio"] for row in rows],
                yerr=[row["variance_ratio_half"] or 0.0 for row in rows],
                marker=marker,
                linestyle="none",
                elinewidth=0.6,
                markersize=5,
                color=f"C{number}",
                label=family,
            )
        mark_boundary(axis)
        axis.set_xlim(*LIMITS)
        places = [LIMITS[0] + (LIMITS[1] - LIMITS[0]) * part / 200 for part in range(200)]
        axis.plot(places, [1 - place for place in places], color="grey", linestyle=":", label="1 − x")
        axis.set_xlabel(TITLES[measure])
    axes[0].set_ylim(0.3, 6.0)
    axes[0].set_yticks([0.3, 0.5, 1, 2, 4], labels=["0.3", "0.5", "1", "2", "4"])
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("variance of the gradient / batch mean's")
    axes[0].legend(fontsize=7)
    save(figure, path)


def plot_whole(path: Path, arms: list[Row]) -> None:
    """Plot the ratio of the gradient of all parameters against explained variance and its weighted form."""
    shown = {
        "explained_variance": TITLES["explained_variance"],
        "whole_weighted": "weighted by ‖∇ log π‖² of all parameters",
    }
    rows = [row for row in arms if row["whole_weighted"] is not None]
    figure, axes = plt.subplots(1, len(shown), figsize=(5.6 * len(shown), 4.6), sharey=True)
    for axis, (measure, title) in zip(axes, shown.items(), strict=True):
        for number, (family, marker) in enumerate(MARKERS.items()):
            here = [row for row in rows if row["family"] == family]
            axis.errorbar(
                [row[measure] for row in here],
                [row["whole_ratio"] for row in here],
                xerr=[row[f"{measure}_half"] or 0.0 for row in here],
                yerr=[row["whole_ratio_half"] or 0.0 for row in here],
                marker=marker,
                linestyle="none",
                elinewidth=0.6,
                color=f"C{number}",
                label=family if here else None,
            )
            for row in here:
                if family in ("critic", "scaled", "shifted"):
                    factor = "" if row["x"] is None else f" {'×' if family == 'scaled' else '+'} {row['x']:g}"
                    axis.annotate(
                        row["critic"] + factor,
                        (row[measure], row["whole_ratio"]),
                        xytext=(4, 3),
                        textcoords="offset points",
                        fontsize=6,
                    )
        mark_boundary(axis)
        axis.set_xlim(*LIMITS)
        places = [place / 100 for place in range(-260, 80)]
        axis.plot(places, [1 - place for place in places], color="grey", linestyle=":", label="1 − x")
        axis.set_xlabel(title)
    axes[0].set_ylim(0.3, 5.0)
    axes[0].set_yticks([0.3, 0.5, 1, 2, 4], labels=["0.3", "0.5", "1", "2", "4"])
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("variance of the gradient of all parameters / batch mean's")
    axes[0].legend(fontsize=7, loc="lower left")
    save(figure, path)


def plot_parts(path: Path, parts: list[Row]) -> None:
    """Plot explained variance, its weighted form and the ratio of variances by tokens left."""
    shown = ("explained_variance", "explained_weighted", "variance_ratio")
    figure, axes = plt.subplots(1, len(shown), figsize=(5 * len(shown), 4))
    for axis, quantity in zip(axes, shown, strict=True):
        for number, (family, critic) in enumerate(SHOWN_BY_PART):
            rows = [row for row in parts if (row["family"], row["critic"]) == (family, critic)]
            axis.errorbar(
                [row["tokens_left"] + number * 0.6 for row in rows],
                [row[quantity] for row in rows],
                yerr=[row[f"{quantity}_half"] or 0.0 for row in rows],
                marker=".",
                capsize=2,
                color=f"C{number}",
                label=f"{critic}, noisy early" if family == WHITE_EARLY else critic,
            )
        axis.axhline(1.0 if quantity == "variance_ratio" else 0.0, color="black", linewidth=0.8)
        axis.set_title(TITLES.get(quantity, "variance of the part's gradient / batch mean's"), fontsize=10)
        axis.set_xlabel("tokens left before the reward (from)")
        axis.grid(alpha=0.3)
    axes[2].set_yscale("log")
    axes[2].set_yticks([0.5, 1, 2, 4], labels=["0.5", "1", "2", "4"])
    axes[2].yaxis.set_minor_formatter(NullFormatter())
    axes[0].legend(fontsize=7)
    save(figure, path)


def mark_boundary(axis: Axes) -> None:
    """Draw lines at a ratio of 1 and a measure of 0."""
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)


def save(figure: Figure, path: Path) -> None:
    """Write a figure and let go of it."""
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
