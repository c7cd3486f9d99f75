"""Print curves of a stage, arm by arm, from the MLflow runs of a sweep: the causes of an ablation's differences.

    python -m docs.ablation_vapo.sweep_curves --workspace DIR --sweep ablation_vapo-20cade --stage policy \
        --metric explained_variance --metric clip_fraction

Prints a Markdown table: for each metric the first value, the last, and the mean over the whole curve, each a mean over the
arm's seeds.
"""

import argparse
import csv
import os
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from mlflow import MlflowClient

Curves = dict[str, list[list[float]]]
"""Arm → the curve of each of its seeds."""


def main() -> None:
    """Read the sweep's rows, then each run's curves, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument(
        "--sweep",
        action="append",
        required=True,
        help="the folder's name under WORKSPACE/sweeps; may be repeated",
    )
    parser.add_argument("--stage", default="policy")
    parser.add_argument("--metric", action="append", required=True)
    given = parser.parse_args()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{given.workspace.resolve() / 'mlflow.db'}"
    client = MlflowClient(uri)
    rows: list[dict[str, str]] = []
    for sweep in given.sweep:
        with (given.workspace / "sweeps" / sweep / "rows.csv").open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["mlflow_run_id"]]
    by_metric = {metric: curves(client, rows, given.stage, metric) for metric in given.metric}
    print(table(by_metric))


def curves(client: MlflowClient, rows: list[dict[str, str]], stage: str, metric: str) -> Curves:
    """Return the metric's values in order of their steps, for every run of which the stage was recorded."""
    found: Curves = defaultdict(list)
    for row in rows:
        run = client.get_run(row["mlflow_run_id"])
        children = client.search_runs(
            [run.info.experiment_id],
            f"tags.`mlflow.parentRunId` = '{run.info.run_id}' and tags.`vantage.stage` = '{stage}'",
        )
        for child in children:
            history = client.get_metric_history(child.info.run_id, metric)
            values = [point.value for point in sorted(history, key=lambda point: point.step)]
            if values:
                found[row["arm"]].append(values)
    return found


def table(by_metric: dict[str, Curves]) -> str:
    """Return the table, with one line an arm and ``first → last (mean)`` for each metric."""
    arms = dict.fromkeys(arm for found in by_metric.values() for arm in found)
    lines = [f"| arm | {' | '.join(by_metric)} |", "|---" * (len(by_metric) + 1) + "|"]
    for arm in arms:
        cells = []
        for found in by_metric.values():
            of_seeds = found.get(arm)
            if not of_seeds:  # an arm without a critic explains no variance
                cells.append("–")
                continue
            first, last = (fmean(values[place] for values in of_seeds) for place in (0, -1))
            mean = fmean(fmean(values) for values in of_seeds)
            cells.append(f"{first:.3g} → {last:.3g} ({mean:.3g})")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
