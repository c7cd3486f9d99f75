"""Draw tables and plots of the study of value bias: means over the seeds, and paired differences."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib

from docs.value_bias.study.measure import Row, row
from vantage.flows.sweeps.report import interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COMPARED = {
    "iteration": ("from_value_model", "from_reward_model"),
    "tokens_left": ("λ = 1", "λ = 0.95"),
    "length": ("λ = 1", "λ = 0.95"),
}
"""Part → the two of which differences are taken."""
PAIRS = {part: f"{part}_paired" for part in COMPARED}
PANELS = {
    "position": ("value", "advantage", "td_error", "advantage_lambda_1"),
    "iteration": ("response_length_mean", "score_mean", "explained_variance"),
    "tokens_left": ("explained_variance", "slope", "bias"),
    "length": ("explained_variance", "slope"),
}
"""Part → what each of its panels shows."""
AXES = {
    "position": "relative position in the response",
    "iteration": "iteration",
    "tokens_left": "tokens left before the reward (from)",
    "length": "length of the response, tokens (from)",
}
TITLES = {
    "value": "mean value (dotted: mean return)",
    "advantage": "mean advantage, λ = 0.95",
    "td_error": "mean TD error (λ = 0)",
    "advantage_lambda_1": "mean advantage, λ = 1",
    "response_length_mean": "response length, tokens",
    "score_mean": "score of the rollout",
    "explained_variance": "explained variance",
    "slope": "slope of values on returns",
    "bias": "mean value − mean return",
}


def over_seeds(measured: list[Row], part: str) -> list[Row]:
    """Return mean and 95 % interval over seeds of every number of a part, in the order measured."""
    samples: dict[tuple[str, float | None, str], list[float]] = {}
    for each in measured:
        if each["part"] == part:
            samples.setdefault((each["critic"], each["x"], each["quantity"]), []).append(each["value"])
    table = []
    for (critic, x, quantity), numbers in samples.items():
        table.append({"critic": critic, "x": x, "quantity": quantity, **over(numbers)})
    return table


def paired(measured: list[Row]) -> Iterator[Row]:
    """Yield differences within each seed, in which both saw the same responses: what the intervals of each alone hide."""
    found = {
        (each["part"], each["seed"], each["critic"], each["x"], each["quantity"]): each["value"]
        for each in measured
    }
    for (part, seed, critic, x, quantity), value in found.items():
        first, second = COMPARED.get(part, ("", ""))
        if critic == first and (other := found.get((part, seed, second, x, quantity))) is not None:
            difference = row(PAIRS[part], f"{first} less {second}", x, quantity, value - other)
            yield {"seed": seed, **difference}


def over(numbers: list[float]) -> dict[str, float]:
    """Return the mean, half the width of its 95 % interval, and the number of seeds; what is undefined in a seed is
    left out.
    """
    numbers = [number for number in numbers if math.isfinite(number)]
    centre, _, high = interval(numbers)
    nan = float("nan")
    if centre is None:
        return {"mean": nan, "half_width": nan, "seeds": 0}
    return {"mean": centre, "half_width": nan if high is None else high - centre, "seeds": len(numbers)}


def write_csv(path: Path, table: list[Row]) -> None:
    """Write one row for each number of the table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["critic", "x", "quantity", "mean", "half_width", "seeds"])
        writer.writeheader()
        writer.writerows(table)


def plot(path: Path, table: list[Row], part: str) -> None:
    """Draw a panel for each entry of ``PANELS``: a line with its interval for each critic."""
    panels = PANELS[part]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, quantity in zip(axes[0], panels, strict=True):
        for number, critic in enumerate(dict.fromkeys(each["critic"] for each in table)):
            for shown, style in ((quantity, "-"), *([("return", ":")] if quantity == "value" else [])):
                points = [
                    each
                    for each in table
                    if each["critic"] == critic and each["quantity"] == shown and each["x"] is not None
                ]
                axis.errorbar(
                    [each["x"] for each in points],
                    [each["mean"] for each in points],
                    yerr=[each["half_width"] for each in points],
                    capsize=2,
                    linestyle=style,
                    color=f"C{number}",
                    label=critic if style == "-" else None,
                )
        axis.set_title(TITLES[quantity], fontsize=10)
        axis.set_xlabel(AXES[part])
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary(tables: dict[str, list[Row]], *, num_seeds: int) -> str:
    """Return Markdown with every number: means with half the width of their 95 % interval over seeds."""
    lines = [f"Means over {num_seeds} seeds ± half of the 95 % interval.", ""]
    for part, table in tables.items():
        quantities = list(dict.fromkeys(each["quantity"] for each in table if each["x"] is not None))
        lines += [f"## By {part.replace('_', ' ')}", ""]
        lines += [f"| critic | {part} | {' | '.join(quantities)} |", "|" + "---|" * (len(quantities) + 2)]
        found = {(each["critic"], each["x"], each["quantity"]): each for each in table}
        for critic, x in dict.fromkeys(
            (each["critic"], each["x"]) for each in table if each["x"] is not None
        ):
            cells = [shown(found.get((critic, x, quantity))) for quantity in quantities]
            lines.append(f"| {critic} | {x:g} | {' | '.join(cells)} |")
        lines.append("")
        lines += [
            f"- {each['critic']}, {each['quantity']}: {shown(each)}" for each in table if each["x"] is None
        ]
        lines.append("")
    return "\n".join(lines)


def shown(cell: Row | None) -> str:
    """Return a mean with its interval."""
    return "" if cell is None else f"{cell['mean']:.3f} ± {cell['half_width']:.3f}"
