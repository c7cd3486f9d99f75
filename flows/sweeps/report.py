"""The report of a sweep: a row for each run, and the comparison of each arm with the baseline, paired by seed.

scipy and matplotlib are imported where they are used, since importing them takes a second.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, stdev

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vantage.runs.wrapped_lines import print_line
from vantage.schemas.safe_text import markdown_text, without_controls
from vantage.schemas.sweep import Measure, Sweep

CONFIDENCE = 0.95
_ANY_WIDTH = 10_000
"""Columns of a terminal on which each table fits."""


@dataclass(frozen=True)
class Row:
    """The result of one run."""

    arm: str
    seed: int
    status: str
    """The run's status; ``failed`` also if the run did not start because a shared stage had failed."""
    values: dict[str, float | None]
    """Measure → its value; None: not measured, or undefined."""
    seconds: float
    """Wall time of the stages that this run computed."""
    run_id: str | None
    mlflow_run_id: str | None
    exit_code: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    """One arm compared with the baseline by one measure."""

    measure: str
    arm: str
    n: int
    """Number of seeds with a value."""
    mean: float | None
    sd: float | None
    """Sample standard deviation over seeds, with n − 1."""
    pairs: int | None
    """Number of seeds that also have a value in the baseline; None for the baseline itself."""
    difference: float | None
    """Mean of arm − baseline over the seeds of ``pairs``."""
    low: float | None
    high: float | None
    """Upper end of the difference's interval, as ``low`` is the lower one."""
    verdict: str
    """``better``, ``worse``, ``inconclusive``, or ``baseline``."""
    published: float | None
    published_difference: float | None


def compare(sweep: Sweep, rows: Sequence[Row]) -> list[Comparison]:
    """Return every arm by every measure, in the sweep's order."""
    return [_compare(sweep, measure, arm, rows) for measure in sweep.measure for arm in sweep.arms]


def _compare(sweep: Sweep, measure: Measure, arm: str, rows: Sequence[Row]) -> Comparison:
    own, base = (_by_seed(rows, each, measure.name) for each in (arm, sweep.baseline))
    published = sweep.published.values if sweep.published else {}
    differences = [value - base[seed] for seed, value in own.items() if seed in base]
    difference, low, high = (
        (None, None, None) if arm == sweep.baseline else interval(differences, comparisons=sweep.comparisons)
    )
    return Comparison(
        measure=measure.name,
        arm=arm,
        n=len(own),
        mean=mean(own.values()) if own else None,
        sd=stdev(own.values()) if len(own) > 1 else None,
        pairs=None if arm == sweep.baseline else len(differences),
        difference=difference,
        low=low,
        high=high,
        verdict="baseline" if arm == sweep.baseline else verdict(low, high, better=measure.better),
        published=published.get(arm),
        published_difference=_published_difference(published, arm, sweep.baseline),
    )


def interval(
    differences: Sequence[float], *, comparisons: int = 1
) -> tuple[float | None, float | None, float | None]:
    """Return mean of paired differences and its two-sided 95 % interval, d̄ ± t(1 − 0.025/m, n−1) · s/√n.

    With m comparisons, all intervals hold together in at least 95 % of sweeps (Bonferroni). Student's t assumes roughly
    normal differences. A single pair has a mean and no interval.
    """
    if len(differences) < 2:
        return (differences[0] if differences else None), None, None
    from scipy.stats import sem, t

    centre = mean(differences)
    margin = float(t.ppf(1 - (1 - CONFIDENCE) / (2 * comparisons), len(differences) - 1) * sem(differences))
    return centre, centre - margin, centre + margin


def verdict(low: float | None, high: float | None, *, better: str) -> str:
    """Return ``inconclusive`` if the interval contains 0, or there is none; else the better side."""
    if low is None or high is None or low <= 0 <= high:
        return "inconclusive"
    return "better" if (low > 0) == (better == "higher") else "worse"


def sharing(stage_keys: Iterable[Mapping[str, str]]) -> dict[str, tuple[int, int]]:
    """Return step → (number of artifacts, number of runs that use them), from each run's step → stage key."""
    used: dict[str, list[str]] = {}
    for keys in stage_keys:
        for step, key in keys.items():
            used.setdefault(step, []).append(key)
    return {step: (len(set(keys)), len(keys)) for step, keys in used.items()}


def sharing_lines(shared: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return ``sft, reward: trained once, reused 44 times``, for stages with reuse."""
    alike: dict[tuple[int, int], list[str]] = {}
    for step, counts in shared.items():
        if counts[0] < counts[1]:
            alike.setdefault(counts, []).append(step)
    return [
        f"{', '.join(steps)}: trained {_times(made)}, reused {_times(used - made)}"
        for (made, used), steps in alike.items()
    ]


# -- as files


def rows_csv(sweep: Sweep, rows: Iterable[Row]) -> str:
    """Return one line for each run."""
    names = [measure.name for measure in sweep.measure]
    header = ["arm", "seed", "status", *names, "seconds", "run_id", "mlflow_run_id", "reason"]
    return _csv(
        header,
        (
            [
                row.arm,
                row.seed,
                row.status,
                *(row.values[name] for name in names),
                f"{row.seconds:.1f}",
                row.run_id,
                row.mlflow_run_id,
                row.reason,
            ]
            for row in rows
        ),
    )


def table_csv(table: Iterable[Comparison]) -> str:
    """Return one line for each arm and measure."""
    return _csv([field.name for field in fields(Comparison)], (list(asdict(line).values()) for line in table))


def table_markdown(
    sweep: Sweep, rows: Sequence[Row], table: Sequence[Comparison], shared: Mapping[str, tuple[int, int]]
) -> str:
    """Return the tables, one for each measure, with explanations."""
    total = len(sweep.arms) * len(sweep.seeds)
    lines = [
        f"# {sweep.sweep}",
        "",
        f"{len(sweep.arms)} arms, seeds {', '.join(map(str, sweep.seeds))}, which reach {', '.join(sweep.reseeds)}. "
        f"{len(rows)} of {total} runs have ended.",
    ]
    lines += ["", *(f"- {line}" for line in sharing_lines(shared))]
    for measure in sweep.measure:
        lines += ["", f"## {measure.name} ({measure.better} is better)", ""]
        lines += _table_lines(sweep, [line for line in table if line.measure == measure.name])
    lines += [
        "",
        f"Difference: mean of arm − {sweep.baseline} over the seeds that both have, with Student's 95 % interval; "
        f"{_correction(sweep)}. Inconclusive: the interval contains 0, or there is none.",
    ]
    if sweep.published:
        said = markdown_text(f"{sweep.published.unit}, {sweep.published.source}")
        lines.append(f"Published: {said}.")
    missing = [row for row in rows if None in row.values.values()]
    if missing:
        lines += ["", "Without a value:", ""]
        lines += [f"- {row.arm}, seed {row.seed}: {markdown_text(status_of_row(row))}" for row in missing]
    return "\n".join(lines) + "\n"


def _correction(sweep: Sweep) -> str:
    if sweep.correct == "none":
        return "not corrected for the number of arms"
    return f"corrected for {sweep.comparisons} comparisons (Bonferroni)"


HEADINGS = ("arm", "n", "mean", "sd", "difference", "95 % interval", "verdict")


_OWN = HEADINGS.index("difference") - 1
"""Number of cells after the name that are about the arm alone."""


def table_cells(line: Comparison) -> list[str]:
    """Return the cells of a table line, in the order of ``HEADINGS``."""
    bounds = "" if line.low is None or line.high is None else f"[{line.low:+.4g}, {line.high:+.4g}]"
    return [
        line.arm,
        str(line.n),
        number(line.mean),
        number(line.sd),
        number(line.difference, sign=True),
        bounds,
        line.verdict,
    ]


def status_of_row(row: Row) -> str:
    """Return the status and reason of a run, for display."""
    return ": ".join(filter(None, [row.status.replace("_", " "), row.reason]))


def number(value: float | None, *, sign: bool = False) -> str:
    """Return the number in four digits; an empty text for None."""
    if value is None:
        return ""
    return f"{value:+.4g}" if sign else f"{value:.4g}"


def _table_lines(sweep: Sweep, lines: Sequence[Comparison]) -> list[str]:
    header = [*HEADINGS, *(["published", "published difference"] if sweep.published else [])]
    shown = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for line in lines:
        cells = table_cells(line)
        if sweep.published:
            cells += [number(line.published), number(line.published_difference, sign=True)]
        shown.append(f"| {' | '.join(cells)} |")
    return shown


def show_table(console: Console, sweep: Sweep, table: Sequence[Comparison]) -> None:
    """Print a table for each measure. If the terminal is too narrow, each arm has several lines: name, numbers,
    comparison."""
    headings = [*HEADINGS, *([f"published: {sweep.published.unit}"] if sweep.published else [])]
    for measure in sweep.measure:
        console.print()
        print_line(console, Text(f"{measure.name} ({measure.better} is better)", style="bold"))
        lines = [
            ([*table_cells(line), *([number(line.published)] if sweep.published else [])], _style(line))
            for line in table
            if line.measure == measure.name
        ]
        shown = Table(box=SIMPLE_HEAD, pad_edge=False)
        for heading in headings:
            is_text = heading in ("arm", "verdict")
            shown.add_column(heading, no_wrap=True, justify="left" if is_text else "right")
        for cells, style in lines:
            shown.add_row(*map(Text, cells), style=style)
        if console.measure(shown, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
            console.print(shown)
            continue
        for (arm, *cells), style in lines:
            print_line(console, Text(f"  {arm}", style=style))
            facts = [
                f"{heading} {cell}" if cell else "" for heading, cell in zip(headings[1:], cells, strict=True)
            ]
            for part in (facts[:_OWN], facts[_OWN:]):
                print_line(console, Text(f"    {'  '.join(filter(None, part))}", style=style))


def _style(line: Comparison) -> str:
    return {"better": "green", "worse": "red"}.get(line.verdict, "")


def plot(sweep: Sweep, rows: Sequence[Row], table: Sequence[Comparison], path: Path) -> None:
    """Plot, for each measure, every run's value with the arm's mean, and the paired differences."""
    from matplotlib.figure import Figure

    arms = list(sweep.arms)
    size = (11, (0.4 * len(arms) + 1.6) * len(sweep.measure))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(sweep.measure), 2, squeeze=False)
    for (left, right), measure in zip(axes, sweep.measure, strict=True):
        for line in (line for line in table if line.measure == measure.name):
            y, values = arms.index(line.arm), _by_seed(rows, line.arm, measure.name)
            left.plot(list(values.values()), [y] * len(values), "o", color="tab:grey", alpha=0.6)
            if line.mean is not None:
                left.plot(line.mean, y, "|", color="black", markersize=18)
            if line.difference is not None:
                reach = None if line.high is None else line.high - line.difference
                right.errorbar(line.difference, y, xerr=reach, fmt="o", capsize=4, color="black")
        right.axvline(0, color="tab:red", linewidth=1)
        for axis in (left, right):
            axis.set_yticks(range(len(arms)), arms)
            axis.set_ylim(len(arms) - 0.5, -0.5)
            axis.grid(axis="x", alpha=0.3)
        right.set_yticklabels([])
        left.set_title(f"{measure.name}: each seed, and the mean")
        right.set_title(f"difference to {sweep.baseline}, 95 % interval")
    figure.savefig(path, dpi=120)


# -- helpers


def _by_seed(rows: Iterable[Row], arm: str, measure: str) -> dict[int, float]:
    values = {row.seed: row.values[measure] for row in rows if row.arm == arm}
    return {seed: value for seed, value in values.items() if value is not None}


def _published_difference(published: Mapping[str, float], arm: str, baseline: str) -> float | None:
    if arm == baseline or arm not in published or baseline not in published:
        return None
    return published[arm] - published[baseline]


def _csv(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_no_formula(cell) for cell in line] for line in lines)
    return text.getvalue()


def _no_formula(cell: object) -> object:
    """Return a text without line ends, and with an apostrophe before a text that a spreadsheet would take for a
    formula."""
    if not isinstance(cell, str):
        return cell
    text = without_controls(cell)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
