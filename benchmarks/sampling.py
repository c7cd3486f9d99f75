"""`vantage.models.sampling.sample` against `generate` of transformers: time for 256 prompts and up to 64 tokens each.

    python benchmarks/sampling.py [--repeats 5] [--eos 2 3 5 6]

Alternating runs in one process on one thread; the ratio of medians is what counts. More ids of `--eos` end the
responses of the untrained model earlier.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy
from vantage.models.sampling import sample

NUM_PROMPTS, MAX_NEW_TOKENS, PAD = 256, 64, 0


def main() -> None:
    """Print seconds, mean length and tokens per second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eos", type=int, nargs="+", default=[2, 3, 5, 6])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_builtin("tiny", Path(folder), seed=1)
        model = load_policy(Path(folder))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 30, (NUM_PROMPTS,), generator=generator).tolist()
    prompts = [[1, *torch.randint(4, 100, (length,), generator=generator).tolist()] for length in lengths]
    ways: dict[str, Callable[[], list[int]]] = {
        "generate": lambda: generate(model, prompts, options.eos),
        "sample": lambda: own(model, prompts, options.eos),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way, function in ways.items():
            start = time.perf_counter()
            response_lengths = function()
            seconds[way].append(time.perf_counter() - start)
    tokens = sum(response_lengths)
    print(
        f"{NUM_PROMPTS} prompts, mean response {tokens / NUM_PROMPTS:.1f} of {MAX_NEW_TOKENS} tokens, 1 thread"
    )
    for way in ways:
        median = statistics.median(seconds[way])
        print(f"{way:9} {median:6.2f} s   {tokens / median:8,.0f} tokens/s")
    print(f"ratio {statistics.median(seconds['generate']) / statistics.median(seconds['sample']):.2f}")


def generate(model: PreTrainedModel, prompts: list[list[int]], eos: list[int]) -> list[int]:
    """Return the lengths of responses that transformers samples."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    starts = torch.tensor([width - len(prompt) for prompt in prompts])
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=eos,
        pad_token_id=PAD,
    )
    mask = (torch.arange(width) >= starts[:, None]).long()
    output = model.generate(input_ids, attention_mask=mask, generation_config=config)[:, width:]  # type: ignore[operator]
    ends = torch.isin(output, torch.tensor(eos)).int()
    return torch.where(ends.any(dim=1), ends.argmax(dim=1) + 1, output.shape[1]).tolist()


def own(model: PreTrainedModel, prompts: list[list[int]], eos: list[int]) -> list[int]:
    """Return the lengths of responses that our own loop samples."""
    samples = sample(
        model,
        prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
        eos_token_ids=eos,
        pad_token_id=PAD,
        seed=0,
    )
    return [len(response) for response in samples.responses]


if __name__ == "__main__":
    main()
