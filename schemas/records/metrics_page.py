"""Print the page ``docs/metrics.md`` from the table of metrics."""

from vantage.schemas.kinds import KINDS
from vantage.schemas.records.metric import NEEDS
from vantage.schemas.records.metrics import METRICS


def docs_page() -> str:
    """Return the page ``docs/metrics.md``."""
    by_batch = " and ".join(f"`{name}`" for name, kind in KINDS.items() if kind.curves_by == "batch")
    lines = [
        "# Metrics",
        "",
        "All metrics of stages. *Headline*: reported once, at the stage's end; gates can use it. *Curve*: reported by",
        f"optimiser step (by iteration where responses are sampled; by batch in {by_batch}).",
        "*†*: an estimate over held-out prompts with an interval, clustered by prompt; a gate can set `confidence`.",
        "Unit `1` is a plain number; `reward` is the unit of the recipe's reward.",
        "This page is printed from `schemas/records/metrics.py` and `schemas/kinds.py`.",
        "",
        "| name | unit | meaning | headline of | curve of |",
        "|---|---|---|---|---|",
    ]
    for metric in {each.family or each.name: each for each in METRICS}.values():
        meaning = metric.meaning.replace("|", "\\|")
        conditions = (NEEDS[need].condition for need in metric.needs)
        meaning = " ".join([meaning, *filter(None, conditions)])
        headline = [
            f"{name} †" if metric.name in kind.estimates else name
            for name, kind in KINDS.items()
            if metric.name in kind.headline
        ]
        curves = [name for name, kind in KINDS.items() if metric.name in kind.curves]
        kinds = f"{', '.join(headline) or '–'} | {', '.join(curves) or '–'}"
        lines.append(f"| {metric.family or f'`{metric.name}`'} | {metric.unit} | {meaning} | {kinds} |")
    return "\n".join(lines) + "\n"
