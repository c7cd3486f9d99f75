"""Chunked log-probabilities, entropies and full KL against full logits: time and peak memory of one training pass.

    python benchmarks/logprobs.py [--vocabulary 49152] [--hidden 576] [--layers 2] [--batch 8] [--response 128]

Times are of alternating runs in one process, so that a busy machine slows both; the ratio of medians is what counts.
Each peak is that of a fresh process.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from vantage.models.logprobs import response_logprobs, token_logprobs
from vantage.models.output_head import output_head
from vantage.models.sequences import Sequences, collate

PROMPT = 32
WAYS = (
    "full", "chunked", "full with entropy", "chunked with entropy", "full with KL", "chunked with KL",
    "apart with entropy and KL", "chunked with entropy and KL",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What every way is run on."""

    model: LlamaForCausalLM
    reference: LlamaForCausalLM
    sequences: Sequences


def full_logits(case: Case, *, with_entropy: bool, with_kl: bool) -> Tensor:
    """Return the same sum from the logits of all positions at once, which `response_logprobs` avoids."""
    sequences = case.sequences
    log_p = full_log_p(case.model, sequences)
    result = log_p.gather(2, sequences.response_ids[:, :, None])[:, :, 0]
    if with_entropy:
        result = result - (log_p.exp() * log_p).sum(dim=-1)
    if with_kl:
        with torch.no_grad():
            log_q = full_log_p(case.reference, sequences)
        result = result + (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return torch.where(sequences.response_mask, result, 0.0)


def full_log_p(model: LlamaForCausalLM, sequences: Sequences) -> Tensor:
    """Return log-probabilities (B, T, V) of every token at every position of a response."""
    logits: Tensor = model(
        input_ids=sequences.input_ids, attention_mask=sequences.attention_mask, use_cache=False
    ).logits.float()
    positions = sequences.response_positions[:, :, None].expand(-1, -1, logits.shape[-1])
    return logits.gather(1, positions).log_softmax(dim=-1)


def chunked(case: Case, *, with_entropy: bool, with_kl: bool) -> Tensor:
    """Return the sum of log-probability, entropy and KL through `response_logprobs`."""
    result = response_logprobs(
        case.model,
        case.sequences,
        temperature=1.0,
        with_entropy=with_entropy,
        reference=case.reference if with_kl else None,
    )
    return sum((each for each in (result.entropy, result.full_kl) if each is not None), result.logprobs)


def apart(case: Case, *, with_entropy: bool, with_kl: bool) -> Tensor:
    """Return the sum in chunks, with the KL from logits of its own: one pass of the trunks and two of the head."""
    assert with_entropy and with_kl
    sequences = case.sequences
    rows, steps = sequences.response_mask.nonzero(as_tuple=True)
    places, targets = (rows, sequences.response_positions[rows, steps]), sequences.response_ids[rows, steps]

    def hidden_states(model: LlamaForCausalLM) -> Tensor:
        output = model.model(sequences.input_ids, attention_mask=sequences.attention_mask, use_cache=False)
        hidden: Tensor = output.last_hidden_state[places]
        return hidden

    hidden, head = hidden_states(case.model), output_head(case.model)
    with torch.no_grad():
        reference = hidden_states(case.reference), output_head(case.reference)
    said = token_logprobs(hidden, targets, head, temperature=1.0, with_entropy=True)
    full_kl = token_logprobs(hidden, targets, head, temperature=1.0, reference=reference).full_kl
    assert said.entropy is not None and full_kl is not None
    return said.logprobs + said.entropy + full_kl


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
        case = build(options)
        before = peak_mib()
        run(options.peak_of, case)
        print(peak_mib() - before)
        return
    # before anything large is made here: a child starts with its parent's peak
    peaks = {way: peak_of_child(way) for way in WAYS}
    case = build(options)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(options.repeats + 1):
        for way in WAYS:
            start = time.perf_counter()
            run(way, case)
            if repeat:  # the first round warms up
                seconds[way].append(time.perf_counter() - start)
    print(f"B={options.batch} T={options.response} V={options.vocabulary} H={options.hidden}, 1 thread")
    medians = {way: statistics.median(seconds[way]) for way in WAYS}
    for way in WAYS:
        print(f"{way:27} {medians[way]:7.3f} s   peak +{peaks[way]:6.0f} MiB")
    for other, way in zip(WAYS[::2], WAYS[1::2], strict=True):
        time_ratio, peak_ratio = medians[way] / medians[other], peaks[way] / peaks[other]
        print(f"{way} / {other}: time {time_ratio:.2f}, peak {peak_ratio:.2f}")


def build(options: argparse.Namespace) -> Case:
    """Return a random model, another as its reference and responses of varied length."""
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
    sequences = collate(prompts, responses, pad_token_id=0)
    return Case(LlamaForCausalLM(config), LlamaForCausalLM(config), sequences)


def run(way: str, case: Case) -> None:
    """Make one forward and backward pass."""
    functions: dict[str, Callable[..., Tensor]] = {"full": full_logits, "apart": apart, "chunked": chunked}
    function = functions[way.split()[0]]
    function(case, with_entropy="entropy" in way, with_kl="KL" in way).sum().backward()
    case.model.zero_grad(set_to_none=True)


def peak_of_child(way: str) -> float:
    """Return the growth of the peak memory, in MiB, of a fresh process that does one pass."""
    command = [sys.executable, *sys.argv, "--peak-of", way]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_mib() -> float:
    """Return the highest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
