"""What a run takes beside its stages' own functions, and how long `vantage plan` and a finished recipe take.

    python -m benchmarks.pipeline_overhead --workspace DIR [--recipe quickstart] [--set stages.policy.iterations=2 …]

One run as `vantage run` makes it, with its Prefect server and ledger, in which each stage notes the wall and CPU time of its function; what is left
is the pipeline's own: start, Prefect, children, keys, hashing, the ledger. Stages wait for each other, so their times add up. Then the same
command again, when everything is made, and `vantage plan`, each as a command of its own (medians of three).
"""

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from vantage.schemas.records.job import StageJob, StageResult

TIMES = "stage_seconds.jsonl"
"""File of the workspace to which stages append what they took."""


def timed_stage(job: StageJob) -> StageResult:
    """Run one attempt at a stage as ``vantage.tasks.stages.run_stage`` does, and append its seconds to a file."""
    from vantage.tasks.stages import run_stage

    start, cpu_start = time.perf_counter(), time.process_time()
    result = run_stage(job)
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
    with (job.scratch.parents[2] / TIMES).open("a") as file:
        file.write(json.dumps({"stage": job.name, **took}) + "\n")
    return result


def run_timed(recipe: str, overrides: list[str], workspace: Path) -> None:
    """Run the recipe as ``vantage run`` does, with stages that record their times. Needs a process of its own."""
    from rich.console import Console

    from vantage.flows.execution import execute
    from vantage.runs.console import Screen
    from vantage.runs.resolving import load_resolved
    from vantage.runs.run import acquire_run
    from vantage.runs.workspace import Workspace

    resolved, chosen = load_resolved(recipe, overrides)
    with acquire_run(Workspace(workspace), resolved, source=recipe) as run:
        screen = Screen(Console(file=io.StringIO(), width=200))
        record = execute(
            run, screen, stage_function="benchmarks.pipeline_overhead.timed_stage", chosen=chosen
        )
    if record.status != "completed":
        raise SystemExit(f"the run is {record.status}")


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Return the wall time of a command that must succeed, and the CPU time of its processes that it waited for."""
    start, cpu_start = time.perf_counter(), _cpu_of_children()
    # a stage's process does not look for modules in the working folder
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return time.perf_counter() - start, _cpu_of_children() - cpu_start


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True, help="a folder without runs")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--child", action="store_true", help="only the run, in this process")
    given = parser.parse_args()
    place: Path = given.workspace.absolute()
    if given.child:
        run_timed(given.recipe, given.overrides, place)
        return
    if (place / TIMES).exists():
        parser.error(f"--workspace={place} has runs; name another folder")
    place.mkdir(parents=True, exist_ok=True)
    sets = [part for override in given.overrides for part in ("--set", override)]
    child = [sys.executable, "-m", "benchmarks.pipeline_overhead", "--child", "--recipe", given.recipe]
    whole = seconds_of([*child, "--workspace", str(place), *sets])
    stages = [json.loads(line) for line in (place / TIMES).read_text().splitlines()]
    for name, total, field in zip(("wall", "CPU"), whole, ("seconds", "cpu_seconds"), strict=True):
        inside = sum(stage[field] for stage in stages)
        print(
            f"{given.recipe}, {name} time: {total:.1f} s, of which {inside:.1f} s in the functions of {len(stages)} "
            f"stages; the pipeline's own {total - inside:.1f} s are {(total - inside) / inside:.1%} of theirs"
        )
    vantage = str(Path(sys.executable).with_name("vantage"))
    for name, command in (("again", "run"), ("plan", "plan")):
        again = [vantage, command, given.recipe, "--workspace", str(place), *sets]
        taken, cpu = zip(*(seconds_of(again) for _ in range(3)), strict=True)
        print(
            f"{name}: {statistics.median(taken):.2f} s ({min(taken):.2f}–{max(taken):.2f}), {statistics.median(cpu):.2f} s of CPU"
        )


if __name__ == "__main__":
    main()
