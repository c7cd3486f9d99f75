"""Chunked log-probabilities against full logits: time and peak memory of one forward and backward pass.

    python benchmarks/logprobs.py [--vocabulary 49152] [--hidden 576] [--layers 2] [--batch 8] [--response 128]

Times are of alternating runs in one process, so that a busy machine slows both; the ratio of medians is what counts.
Peaks are of a fresh process each.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.logprobs import response_logprobs
from models.sequences import Sequences, collate

PROMPT = 32
WAYS = ("full", "chunked", "full with entropy", "chunked with entropy")


def full_logits(model: LlamaForCausalLM, sequences: Sequences, *, with_entropy: bool) -> Tensor:
    """What `response_logprobs` replaces: logits of every position at once."""
    logits = model(
        input_ids=sequences.input_ids, attention_mask=sequences.attention_mask, use_cache=False
    ).logits.float()
    positions = sequences.response_positions[:, :, None].expand(-1, -1, logits.shape[-1])
    log_p = logits.gather(1, positions).log_softmax(dim=-1)
    result = log_p.gather(2, sequences.response_ids[:, :, None])[:, :, 0]
    if with_entropy:
        result = result - (log_p.exp() * log_p).sum(dim=-1)
    return torch.where(sequences.response_mask, result, 0.0)


def chunked(model: LlamaForCausalLM, sequences: Sequences, *, with_entropy: bool) -> Tensor:
    """The same sum of log-probability and entropy through `response_logprobs`."""
    result = response_logprobs(model, sequences, temperature=1.0, with_entropy=with_entropy)
    return result.logprobs if result.entropy is None else result.logprobs + result.entropy


def main() -> None:
    """Print one row for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("vocabulary", 49152),
        ("hidden", 576),
        ("layers", 2),
        ("batch", 8),
        ("response", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        model, sequences = build(options)
        before = peak_mib()
        run(options.peak_of, model, sequences)
        print(peak_mib() - before)
        return
    # before anything large is made here: a child starts with its parent's peak
    peaks = {way: peak_of_child(way) for way in WAYS}
    model, sequences = build(options)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(options.repeats + 1):
        for way in WAYS:
            start = time.perf_counter()
            run(way, model, sequences)
            if repeat:  # the first round warms up
                seconds[way].append(time.perf_counter() - start)
    print(f"B={options.batch} T={options.response} V={options.vocabulary} H={options.hidden}, 1 thread")
    for way in WAYS:
        print(f"{way:22} {statistics.median(seconds[way]):7.3f} s   peak +{peaks[way]:6.0f} MiB")


def build(options: argparse.Namespace) -> tuple[LlamaForCausalLM, Sequences]:
    """A random model and responses of varied length."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64 or 1,
        num_key_value_heads=options.hidden // 64 or 1,
    )
    lengths = torch.linspace(options.response // 4, options.response, options.batch).int().tolist()
    prompts = torch.randint(options.vocabulary, (options.batch, PROMPT)).tolist()
    responses = [torch.randint(options.vocabulary, (length,)).tolist() for length in lengths]
    return LlamaForCausalLM(config), collate(prompts, responses, pad_token_id=0)


def run(way: str, model: LlamaForCausalLM, sequences: Sequences) -> None:
    """One forward and backward pass."""
    function: Callable[..., Tensor] = full_logits if way.startswith("full") else chunked
    function(model, sequences, with_entropy="entropy" in way).sum().backward()
    model.zero_grad(set_to_none=True)


def peak_of_child(way: str) -> float:
    """Growth of the peak memory, in MiB, of a fresh process that does one pass."""
    command = [sys.executable, *sys.argv, "--peak-of", way]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_mib() -> float:
    """Highest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
