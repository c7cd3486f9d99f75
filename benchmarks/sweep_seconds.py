"""CPU seconds of one stage in each arm of a sweep, one after the other on one thread.

    python -m benchmarks.sweep_seconds recipes/study_critics.yaml --workspace DIR --stage policy --seed 1 \
        --set stages.policy.iterations=2 --set stages.policy.validate_every=2

What the stage reads is reused from the workspace where it is there. Measured is ``time.process_time`` of the stage, without
loading torch and transformers. Prints a table in Markdown.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks.estimate_error import MEASURED
from flows.runs.workspace import Workspace
from schemas.recipe.recipe import ResolvedRecipe


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

    from flows.runs.resolving import resolve_sweep
    from schemas.sweep import load_sweep

    swept = resolve_sweep(load_sweep(given.sweep, given.overrides, arms=given.arms, seeds=[given.seed]))
    place = Workspace(given.workspace.absolute())
    print("| arm | CPU seconds |\n|---|---|")
    for cell in swept.cells():
        print(f"| `{cell.arm}` | {seconds(cell.recipe, place, given.stage):.1f} |", flush=True)


def seconds(recipe: ResolvedRecipe, place: Workspace, stage: str) -> float:
    """CPU seconds of the stage; what it reads is made first if it is missing."""
    from flows.attempts.jobs import resources_of
    from flows.machine import Machine
    from flows.orchestrator import Orchestrator
    from flows.runs.run import acquire_run
    from ledger.run_ledger import Ledger
    from schemas.records.attempt import Share
    from storage.store import Store
    from tests.flows.orchestrated import Witness

    with acquire_run(place, recipe, source="benchmark") as run:
        orchestrator = Orchestrator(
            run,
            store=Store(place.store),
            ledger=Ledger(None, place.root, recipe.recipe),
            watcher=Witness(),
            stage_function="benchmarks.estimate_error.measured_stage",
        )
        orchestrator.begin()
        for step in orchestrator.inputs:
            cpus, _ = Machine(cpus=1).share_of(resources_of(recipe, step))
            request = orchestrator.request(step, Share(cpus=cpus))
            if request is not None:
                record = orchestrator.attempt(request)
                assert record.digest is not None, record.reason
            if step == stage:
                break
    lines = [json.loads(line) for line in (place.root / MEASURED).read_text().splitlines()]
    return float([line["seconds"] for line in lines if line["stage"] == stage][-1])


if __name__ == "__main__":
    main()
