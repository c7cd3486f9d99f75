"""Measure whether a critic lowers the variance of the policy's gradient where its explained variance is above 0, with plots.

    python -m docs.critic_boundary.study --workspace DIR --output docs/critic_boundary --seeds 1 2 3 4 5

For every seed it runs `recipes/study_critic_boundary.yaml` (a policy and a reward model of their own), trains critics of
that policy, draws rollouts at its fixed weights and takes the policy's gradient of each with every baseline: the trace of
its covariance over the rollouts, against that with the batch's mean return on the same rollouts. It writes one JSON a
seed (a seed that has one is not measured again), CSVs and PNGs. Intervals are 95 % ones over seeds (Student's t).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from docs.critic_boundary.study.measure import measure
from docs.critic_boundary.study.report import write_report
from docs.critic_boundary.study.setting import prepare

DIGITS = 7
"""Significant digits of the numbers that are kept."""


def main() -> None:
    """Measure what is missing, then write tables and plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True, help="of the runs; one for all seeds")
    parser.add_argument("--output", type=Path, required=True, help="a folder for tables and plots")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=1, help="of the measurements")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measured = []
    for seed in arguments.seeds:
        kept = arguments.output / f"seed-{seed}.json"
        if not kept.is_file():
            setting = prepare(arguments.workspace, seed)
            start = time.process_time()
            found = measure(setting)
            print(f"seed {seed}: {time.process_time() - start:.0f} CPU seconds", flush=True)
            kept.write_text(json.dumps(rounded(found), ensure_ascii=False) + "\n")
        measured.append(json.loads(kept.read_text()))
    write_report(measured, arguments.output)


def rounded(found: Any) -> Any:
    """Return the value with every float in it to `DIGITS` significant digits."""
    if isinstance(found, float):
        return float(f"{found:.{DIGITS}g}")
    if isinstance(found, dict):
        return {name: rounded(each) for name, each in found.items()}
    return [rounded(each) for each in found] if isinstance(found, list) else found


if __name__ == "__main__":
    main()
