"""CPU seconds of one stage in each arm of a sweep, one after the other on one thread.

    python -m benchmarks.sweep_seconds recipes/study_critics.yaml --workspace DIR --stage policy --seed 1 \
        --set stages.policy.iterations=2 --set stages.policy.validate_every=2

What the stage reads is reused from the workspace where it is there. ``time.process_time`` of the stage is measured,
without loading torch and transformers. Prints a table in Markdown.
"""

import argparse
import os
from pathlib import Path

from benchmarks.estimate_error import MEASURED, measure_stages
from vantage.runs.workspace import Workspace


def main() -> None:
    """Run the stage in every arm, and print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--seed", required=True, help="one of the sweep's")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=None)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}

    from vantage.runs.resolving import resolve_sweep
    from vantage.schemas.sweep import load_sweep

    swept = resolve_sweep(load_sweep(given.sweep, given.overrides, arms=given.arms, seeds=[given.seed]))
    place = Workspace(given.workspace.absolute())
    print("| arm | CPU seconds |\n|---|---|")
    for cell in swept.cells():
        (place.root / MEASURED).unlink(missing_ok=True)  # remove the measurement of other arms
        measured = measure_stages(cell.recipe, place, source="benchmark", last=given.stage)
        found = measured.get(given.stage)
        shown = f"{found['seconds']:.1f}" if found else "in the store already"
        print(f"| `{cell.arm}` | {shown} |", flush=True)


if __name__ == "__main__":
    main()
