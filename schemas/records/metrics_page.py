"""The page ``docs/metrics.md``, printed from the table of metrics."""

from schemas.records.metrics import METRICS
from schemas.records.uncertainty import estimated_by


def docs_page() -> str:
    """The page ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Every number that a stage reports. *Headline*: reported once, at the stage's end; a gate can ask for it.",
        "*Curve*: reported against the optimiser step (the iteration, where responses are sampled; the batch, in",
        "`preference_collection`). *±*: an estimate over held-out prompts, which comes with its standard error, clustered by",
        "prompt; a gate can ask for `confidence`.",
        "Unit `1` is a plain number; `reward` is the unit of the recipe's reward.",
        "This page is printed from `schemas/records/metrics.py`.",
        "",
        "| name | unit | meaning | headline of | curve of |",
        "|---|---|---|---|---|",
    ]
    for metric in METRICS:
        meaning = metric.meaning.replace("|", "\\|")
        if metric.judge:
            meaning += f" With a {metric.judge} as judge."
        headline = [f"{kind} ±" if metric.name in estimated_by(kind) else kind for kind in metric.headline]
        kinds = f"{', '.join(headline) or '–'} | {', '.join(metric.curve) or '–'}"
        lines.append(f"| `{metric.name}` | {metric.unit} | {meaning} | {kinds} |")
    return "\n".join(lines) + "\n"
