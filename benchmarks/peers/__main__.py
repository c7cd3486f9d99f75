"""One table: our stages against TRL's trainers and transformers' ``generate``, at equal work, in paired runs.

    python -m benchmarks.peers [--workloads ppo sft …] [--pairs 5] [--peers-python .venv-peers/bin/python] [--json FILE]

`make bench` makes the peers' environment first. In a pair both sides work at the same time, one process, one thread and one core
each, and the cores change sides from pair to pair; each side warms up, waits for the other, and goes on until both are done. No ratio is printed where
optimiser steps, trained rows, trained tokens or sampled tokens differ.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.peers.pairs import Pair, Spread, check_equal, run_pair, spread, two_cores
from benchmarks.peers.prepare import prepare
from benchmarks.peers.workloads import WORKLOADS, Workload

HEADER = (
    "| workload | ours, s | peer, s | peer / ours | of CPU time | positions trained, ours / peer | read, ours / peer |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Run the console script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--peers-python", type=Path, default=Path(".venv-peers/bin/python"))
    parser.add_argument("--compile", action="store_true", help="our side has compile: true")
    parser.add_argument("--json", type=Path, help="where all pairs are written")
    options = parser.parse_args()
    if not options.peers_python.exists():
        parser.error(f"--peers-python={options.peers_python} is not there; make bench makes it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs, which ends both sides
    cores = sorted(os.sched_getaffinity(0))
    ours, peer = (
        [str(python), "-m", f"benchmarks.peers.{side}"]
        for python, side in ((sys.executable, "ours"), (options.peers_python, "trl_side"))
    )
    measured: dict[str, list[Pair]] = {}
    print(HEADER, flush=True)
    for name in options.workloads:
        workload = replace(WORKLOADS[name], compiled=options.compile)
        with TemporaryDirectory() as folder:
            material = prepare(workload, Path(folder))
            measured[name] = []
            for number in range(options.pairs):
                pair = run_pair(material, ours=ours, peer=peer, cores=two_cores(number, cores))
                check_equal(name, pair)
                measured[name].append(pair)
        print(row(workload, measured[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({n: [asdict(p) for p in ps] for n, ps in measured.items()}))


def row(workload: Workload, pairs: Sequence[Pair]) -> str:
    """Return a line of the table, in which each median has the lowest and the highest number beside it."""
    first = pairs[0]
    cells = (
        workload.name,
        shown(spread([pair.ours.seconds for pair in pairs])),
        shown(spread([pair.peer.seconds for pair in pairs])),
        shown(spread([pair.ratio for pair in pairs])),
        shown(spread([pair.cpu_ratio for pair in pairs])),
        f"{first.ours.trained_positions:,} / {first.peer.trained_positions:,}",
        f"{first.ours.read_positions:,} / {first.peer.read_positions:,}",
    )
    return f"| {' | '.join(cells)} |"


def shown(found: Spread) -> str:
    """Return the measurement as a cell of the table."""
    return f"{found.median:.2f} ({found.lowest:.2f}–{found.highest:.2f})"


if __name__ == "__main__":
    main()
