"""Measure what a reward model does as a critic, and what value pretraining cures, with plots.

    python -m docs.value_bias.study --workspace DIR --output docs/value_bias --seeds 1 2 3 4 5

For every seed it runs `recipes/study_value_bias.yaml` (SFT and reward model are trained once and shared) and measures

1. mean value and mean advantage against the relative position in the response, of the reward model as a critic and
   of the pretrained one, on the same responses to test prompts,
2. response length, score and explained variance over the iterations of two policy stages that differ in nothing but
   the critic they start from,
3. two critics that start from the reward model and learn from the same responses, one with targets of λ = 1 and one
   of λ = 0.95: how much of the return they know, against the number of tokens that are left before the reward.

It writes one JSON a seed (a seed that has one is not measured again), a CSV and a PNG for each of the three, and
`summary.md`. Intervals are 95 % ones of the mean over seeds (Student's t).
"""

import argparse
import json
from pathlib import Path

import torch

from docs.value_bias.study.measure import Row, measure
from docs.value_bias.study.report import PAIRS, PANELS, over_seeds, paired, plot, summary, write_csv


def main() -> None:
    """Measure what is missing, then write tables and plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True, help="of the runs; one for all seeds")
    parser.add_argument("--output", type=Path, required=True, help="a folder for tables and plots")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--threads", type=int, default=1, help="of the measurements; the stages have their own"
    )
    parser.add_argument("--set", action="append", default=[], help="passed on to every run")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measured: list[Row] = []
    for seed in arguments.seeds:
        kept = arguments.output / f"seed-{seed}.json"
        if not kept.is_file():
            rows = measure(arguments.workspace, seed, arguments.set)
            kept.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        measured += json.loads(kept.read_text())
    measured += list(paired(measured))
    tables = {part: over_seeds(measured, part) for part in (*PANELS, *PAIRS.values())}
    for part, table in tables.items():
        write_csv(arguments.output / f"{part}.csv", table)
        if part in PANELS:
            plot(arguments.output / f"{part}.png", table, part)
    (arguments.output / "summary.md").write_text(summary(tables, num_seeds=len(arguments.seeds)))
    print((arguments.output / "summary.md").read_text())


if __name__ == "__main__":
    main()
