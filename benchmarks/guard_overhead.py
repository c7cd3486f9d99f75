"""Measure what the default guards and their metrics cost: the CPU time of one PPO iteration with them over without.

    python -m benchmarks.guard_overhead [--pairs 7]

Both sides are our own stage and run at once, with one thread and one core each; they swap cores from pair to pair.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.peers import ours
from benchmarks.peers.pairs import run_pair, two_cores
from benchmarks.peers.prepare import prepare
from benchmarks.peers.workloads import WORKLOADS
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.guarding import Guarding
from vantage.tasks.updates import gathering

WITH, WITHOUT = "with", "without"


def main() -> None:
    """Run the pairs and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    side = [sys.executable, "-m", "benchmarks.guard_overhead"]
    with TemporaryDirectory() as folder:
        material = prepare(WORKLOADS["ppo"], Path(folder))
        ratios = []
        for number in range(asked.pairs):
            pair = run_pair(
                material, ours=[*side, WITH], peer=[*side, WITHOUT], cores=two_cores(number, cores)
            )
            ratios.append(pair.ours.cpu_seconds / pair.peer.cpu_seconds)
            print(f"pair {number + 1}: {ratios[-1]:.4f}", flush=True)
    print(
        f"with guards / without: {median(ratios):.4f} (lowest {min(ratios):.4f}, highest {max(ratios):.4f})"
    )


def compute(how: str, material: str, core: str) -> None:
    """Compute one of the sides until the runner ends this process."""
    if how == WITHOUT:
        setattr(gathering, "response_shape", lambda responses: {})  # noqa: B010 - mypy knows no other module's imports
        Attempt._guarding_of = lambda self, job: Guarding(())  # type: ignore[method-assign]
    ours.main(material, core)


if __name__ == "__main__":
    if sys.argv[1:2] in ([WITH], [WITHOUT]):
        compute(*sys.argv[1:4])
    else:
        main()
