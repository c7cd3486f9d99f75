"""Fine-tuning with packing against padding: tokens per second, positions and passes, for batches of mixed and of like length.

    python -m benchmarks.packing [--repeats 7] [--batches 4]

Forward and backward passes of the built-in model over the same batches, packed and padded in turn, on one thread: what counts
is the median of the ratios of neighbouring runs, since the machine may be busy with other work. Lengths are log-normal (median
60 tokens, at most 500), as those of instructions are; batches of 32 rows, eight in a pass.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy
from vantage.models.model_config import MAX_BUILTIN_LENGTH
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Packing, Sequences, collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.training.likelihood import accumulate_nll
from vantage.tasks.training.passes import packed_passes, passes

ROWS, BATCH_SIZE, MICROBATCH_SIZE = 2048, 32, 8
MEDIAN, SIGMA, PROMPT = 60.0, 0.8, 4


def main() -> None:
    """Print a line for each way of making batches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_builtin("tiny", Path(folder), seed=1)
        policy = PolicyModel(load_policy(Path(folder)))
    draw = torch.Generator().manual_seed(0)
    drawn = (MEDIAN * (SIGMA * torch.randn(ROWS, generator=draw)).exp()).long()
    lengths = tuple(drawn.clamp(PROMPT + 1, MAX_BUILTIN_LENGTH - 12).tolist())
    for name, of_like_length in (("mixed", False), ("of like length", True)):
        order = DataOrder(ROWS, BATCH_SIZE, seed=1, lengths=lengths if of_like_length else None)
        batches = [rows_of([lengths[row] for row in order.batch(step)]) for step in range(options.batches)]
        tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(options.repeats + 1):
            for packing in (False, True) if repeat % 2 else (True, False):
                took = time_of(policy, batches, packing=packing)
                if repeat:  # the first warms up
                    seconds[packing].append(took)
        ratio = statistics.median(a / b for a, b in zip(seconds[False], seconds[True], strict=True))
        lines = [
            f"{'packed' if packing else 'padded'} {statistics.median(seconds[packing]):.2f} s, "
            f"{tokens / statistics.median(seconds[packing]):,.0f} tokens/s, {positions(batches, packing=packing)}"
            for packing in (False, True)
        ]
        print(f"{name}: {tokens:,} tokens; {lines[0]}; {lines[1]}; {ratio:.2f} times as fast")


def rows_of(lengths: list[int]) -> Sequences:
    """Return a batch of rows of so many tokens."""
    prompts = [[1, *range(10, 9 + PROMPT)] for _ in lengths]
    responses = [[20 + (7 * place) % 60 for place in range(length - PROMPT)] for length in lengths]
    return collate(prompts, responses, pad_token_id=0)


def time_of(policy: PolicyModel, batches: list[Sequences], *, packing: bool) -> float:
    """Return the seconds of the passes over all batches."""
    start = time.perf_counter()
    for batch in batches:
        policy.zero_grad()
        accumulate_nll(
            policy,
            batch,
            temperature=1.0,
            limits=PassLimits(MICROBATCH_SIZE),
            precision="float32",
            packing=packing,
        )
    return time.perf_counter() - start


def positions(batches: list[Sequences], *, packing: bool) -> str:
    """Return how many positions the passes compute, and how many passes there are."""
    computed, number = 0, 0
    for batch in batches:
        for part in (packed_passes if packing else passes)(
            batch.total_lengths.tolist(), PassLimits(MICROBATCH_SIZE)
        ):
            micro = part.select(batch)
            ids = micro.input_ids if not isinstance(micro.layout, Packing) else micro.layout.input_ids
            computed, number = computed + ids.numel(), number + 1
    return f"{computed:,} positions in {number} passes"


if __name__ == "__main__":
    main()
