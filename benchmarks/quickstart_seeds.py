"""Run the quickstart once with each of several seeds, and make the table in docs/explanation/seeds.md.

    python benchmarks/quickstart_seeds.py --seeds 1 2 3 4 5 --workspace DIR

Every seed has a workspace of its own, so nothing is reused between them. A seed whose run has finished is read again, not
run again. The bits depend on the number of torch's threads: ``OMP_NUM_THREADS=1`` gives those of that page.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

HEADER = (
    "| seed | SFT | VAPO | gain (points) | SFT greedy | VAPO greedy | reward model, test pairs | "
    "critic, explained variance | Var(G) | bias | MSE |"
)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--workspace", type=Path, required=True, help="a folder for all of it")
    parser.add_argument("--set", action="append", default=[], help="passed on to every run")
    arguments = parser.parse_args()
    reports = [run(seed, arguments.workspace / f"seed-{seed}", arguments.set) for seed in arguments.seeds]
    print(table(dict(zip(arguments.seeds, reports, strict=True))))


def run(seed: int, workspace: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the report of one run, kept beside the run for the next call."""
    kept = workspace / "report.json"
    if kept.is_file():
        known: dict[str, Any] = json.loads(kept.read_text())
        return known
    vantage = Path(sys.executable).with_name("vantage")
    sets = [part for override in (f"seed={seed}", *overrides) for part in ("--set", override)]
    done = subprocess.run(
        [vantage, "run", "quickstart", "--workspace", workspace, "--json", *sets],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"seed {seed} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    kept.write_text(json.dumps(report, indent=1))
    return report


def table(reports: dict[int, dict[str, Any]]) -> str:
    """Return a table in Markdown: a row for each seed, and the means."""
    rows = {str(seed): numbers(report) for seed, report in reports.items()}
    rows["mean"] = [mean(column) for column in zip(*rows.values(), strict=True)]
    lines = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    lines += [
        f"| {name} | " + " | ".join(map(shown, HEADER.split("|")[2:], row)) + " |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def numbers(report: dict[str, Any]) -> list[float]:
    """Return the numbers of one run, in the order of the header."""
    metrics = {name: stage["metrics"] for name, stage in report["stages"].items()}
    evaluation, value = metrics["evaluation"], metrics["value"]
    return [
        evaluation["baseline_accuracy"],
        evaluation["accuracy"],
        100 * evaluation["accuracy_gain"],
        evaluation["baseline_greedy_accuracy"],
        evaluation["greedy_accuracy"],
        metrics["reward"]["pair_accuracy"],
        value["explained_variance"],
        value["return_variance"],
        value["value_bias"],
        value["value_mse"],
    ]


def shown(column: str, number: float) -> str:
    """Return a number with the digits that its column deserves."""
    if "points" in column:
        return f"{number:+.1f}"
    return f"{number:.3f}"


if __name__ == "__main__":
    main()
