"""How time and memory grow with the work: rows, vocabulary, responses to a prompt, length.

    python -m benchmarks.growth [--axes rows vocabulary group length] [--repeats 3]

An update is the forward and backward passes of a policy over one minibatch, cut as its stage cuts them; sampling is one rollout. The model has the
built-in tiny shape but for its vocabulary, and random weights. Each size has a process of its own on one thread. Seconds are CPU seconds, the median of
the repeats; memory is the most that was resident above the loaded model; the exponent is that of time from one size to the next. Prints tables in Markdown.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

PROMPT_SHARE = 0.5
"""Share of a row's tokens that belong to the prompt."""


@dataclass(frozen=True)
class Size:
    """One minibatch, whose rows have equal lengths."""

    rows: int = 16
    vocabulary: int = 512
    group: int = 1
    """Responses to each prompt."""
    length: int = 64
    """Tokens of prompt and response."""


AXES: dict[str, list[Size]] = {
    "rows": [replace(Size(), rows=rows) for rows in (4, 16, 64, 256)],
    "vocabulary": [replace(Size(), vocabulary=size) for size in (512, 8_192, 49_152, 151_936)],
    "group": [replace(Size(), rows=64, group=group) for group in (1, 4, 16, 64)],
    "length": [replace(Size(), rows=4, length=length) for length in (32, 128, 512, 1_024, 4_096)],
}


@dataclass(frozen=True)
class Measured:
    """The time and memory that one size took."""

    update: float
    """CPU seconds."""
    sampling: float
    """CPU seconds."""
    positions: int
    """Positions that the passes of the update computed."""
    update_mib: float
    sampling_mib: float


def measure(size: Size, repeats: int) -> Measured:
    """Measure one size, in this process."""
    import torch
    from transformers import LlamaForCausalLM

    from benchmarks.peak_memory import PeakMemory
    from vantage.models.builtin import builtin_config
    from vantage.models.pass_counts import taken_counts
    from vantage.models.policy import PolicyModel
    from vantage.models.sampling import sample
    from vantage.models.sequences import collate
    from vantage.schemas.recipe.pass_limits import UNLIMITED
    from vantage.tasks.training.passes import passes_of

    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = builtin_config("tiny")
    config.vocab_size, config.max_position_embeddings = size.vocabulary, size.length
    policy = PolicyModel(LlamaForCausalLM(config))
    num_prompt = int(PROMPT_SHARE * size.length)
    num_response = size.length - num_prompt

    def texts(count: int, tokens: int) -> list[list[int]]:
        return torch.randint(4, size.vocabulary, (count, tokens)).tolist()

    prompts = [prompt for prompt in texts(size.rows // size.group, num_prompt) for _ in range(size.group)]
    batch = collate(prompts, texts(size.rows, num_response), pad_token_id=0)

    def update() -> None:
        policy.zero_grad()
        for part in passes_of(batch, UNLIMITED):
            micro = part.select(batch)
            logprobs = policy.logprobs(micro, temperature=1.0).logprobs
            (-logprobs[micro.response_mask].sum() / (size.rows * num_response)).backward()

    def sampling() -> None:
        sample(
            policy.causal_lm,
            prompts,
            max_new_tokens=num_response,
            temperature=1.0,
            eos_token_ids=[],
            pad_token_id=0,
            seed=0,
        )

    def timed(work: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds, and the MiB above what was in use before the first call."""
        memory, seconds = PeakMemory(), []
        work()  # warms up
        for _ in range(repeats):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
        return statistics.median(seconds), memory.bytes / 2**20

    of_sampling = timed(sampling)
    taken_counts()
    of_update = timed(update)
    positions = taken_counts().positions // (repeats + 1)
    return Measured(of_update[0], of_sampling[0], positions, of_update[1], of_sampling[1])


def measure_apart(size: Size, repeats: int) -> Measured:
    """Return what one size takes, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.growth", "--repeats", str(repeats)]
    done = subprocess.run(
        [*command, "--one", json.dumps(asdict(size))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def exponents(amounts: list[int], seconds: list[float]) -> list[str]:
    """Return, for each size after the first, log(time / time before) / log(amount / amount before)."""
    found = [
        math.log(seconds[i] / seconds[i - 1]) / math.log(amounts[i] / amounts[i - 1])
        for i in range(1, len(amounts))
    ]
    return ["", *(f"{each:.2f}" for each in found)]


def table(axis: str, sizes: list[Size], measured: list[Measured]) -> str:
    """Return the table in Markdown."""
    amounts = [getattr(size, axis) for size in sizes]
    of_update = exponents(amounts, [each.update for each in measured])
    of_sampling = exponents(amounts, [each.sampling for each in measured])
    lines = [
        f"| {axis} | update, s | exponent | positions | MiB | sampling, s | exponent | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {amount:,} | {each.update:.3f} | {first} | {each.positions:,} | {each.update_mib:,.0f} "
        f"| {each.sampling:.3f} | {second} | {each.sampling_mib:,.0f} |"
        for amount, each, first, second in zip(amounts, measured, of_update, of_sampling, strict=True)
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the console script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help="a size as JSON, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(Size(**json.loads(options.one)), options.repeats))))
        return
    for axis in options.axes:
        sizes = AXES[axis]
        print(table(axis, sizes, [measure_apart(size, options.repeats) for size in sizes]), "\n", flush=True)


if __name__ == "__main__":
    main()
