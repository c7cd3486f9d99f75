"""One PPO iteration of our stages' code on a GPU, part by part, beside what it cannot do without and beside TRL.

    python -m benchmarks.gpu [--size 0.5b 1.5b] [--prompts 128 --samples 16] [--peers-python .venv-peers/bin/python]
    python -m benchmarks.gpu --floor h200 [--iterations 4]
    python -m benchmarks.gpu --device cpu --size tiny --prompts 2 --samples 2 --prompt-tokens 8 --response-tokens 8

Needs torch, transformers and pydantic: no Prefect, no MLflow, no network. Policy, critic, reference and reward model have the
same shape and random weights; no token ends a response, so that all have the same length. Seconds are medians of
--measured iterations after --warmup, by the GPU's clock. MFU is of the data sheet's dense bfloat16 peak; floors are of products at
the rate that a large product reaches on this device, and of bytes at the data sheet's bandwidth (benchmarks/gpu/floor.py).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.devices import Facts, facts
from benchmarks.gpu.floor import Rates, works
from benchmarks.gpu.parts import Iteration
from benchmarks.gpu.report import HEADER, as_json, graphs_line, heading, line, rows
from benchmarks.gpu.sizes import SIZES, Rollout, Size, TooLarge, fit
from benchmarks.gpu.timing import time_parts
from benchmarks.gpu.trl import SideFailed, seconds_of_trl
from vantage.estimates.devices import GPUS

MEASURED_PRODUCTS = {"h200": 790e12}
"""FLOP/s that large bfloat16 products reached on a device, where that was seen; --floor takes the data sheet's otherwise."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script."""
    parser = _parser()
    options = parser.parse_args(arguments)
    rollout = Rollout(
        options.prompts,
        options.samples,
        options.prompt_tokens,
        options.response_tokens,
        options.minibatches,
    )
    if rollout.responses % rollout.minibatches:
        parser.error(
            f"--minibatches={rollout.minibatches} does not divide {rollout.responses} responses; use 1 or another divisor"
        )
    sizes = [SIZES[name] for name in options.size]
    if options.floor:
        print_floors(options.floor, sizes, rollout, iterations=options.iterations)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch finds no GPU; use --device cpu --size tiny to try the script")
    device = torch.device(options.device)
    known, found = facts(device), []
    for size in sizes:
        try:
            found.append(measure(size, rollout, known, device, options))
        except TooLarge as error:
            print(f"{size.name}: {error}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(
    size: Size, rollout: Rollout, known: Facts, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Print the table of one size; returns its numbers."""
    fits = fit(size, rollout, memory=known.memory)
    print(heading(size.name, rollout, fits, known, precision=options.precision), flush=True)
    iteration = Iteration(size, rollout, fits, device=device, precision=options.precision)
    timed = time_parts(iteration.parts(), device, warmup=options.warmup, measured=options.measured)
    found = rows(timed, works(size, rollout, sampled_rows=fits.sampled_rows), known)
    counts, plain = iteration.counts, None
    if device.type == "cuda" and not options.skip_plain:
        without = {"sampling": iteration.sample_plainly}
        plain = time_parts(without, device, warmup=0, measured=1, with_waits=False)["sampling"]
    line_of_graphs = graphs_line(counts, plain, sampling=found[0])
    print("\n".join([HEADER, *map(line, found), line_of_graphs]), flush=True)
    found_json = as_json(size.name, found, known, fits, counts, plain)
    del iteration
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if options.peers_python:
        found_json["trl_seconds"] = beside_trl(size, rollout, found[-1].seconds, options)
    return found_json


def beside_trl(size: Size, rollout: Rollout, ours: float, options: argparse.Namespace) -> float | None:
    """Print what TRL's PPO takes for the same iteration; returns seconds, or None where it failed."""
    try:
        theirs = seconds_of_trl(
            options.peers_python, size, rollout, device=options.device, at_once=options.trl_rows
        )
    except SideFailed as error:
        print(f"TRL: {error}", flush=True)
        return None
    print(f"TRL: {theirs:.3g} s an iteration, {theirs / ours:.2f} times ours", flush=True)
    return theirs


def print_floors(name: str, sizes: Sequence[Size], rollout: Rollout, *, iterations: int) -> None:
    """Print the floors by a data sheet; the device need not be here."""
    device = GPUS[name]
    flops = MEASURED_PRODUCTS.get(name, device.bfloat16)
    rates = Rates(flops, device.bandwidth)
    print(
        f"{device.name}: products {flops / 1e12:.4g} TFLOP/s, memory {device.bandwidth / 1e9:.4g} GB/s ({device.source})"
    )
    for size in sizes:
        try:
            at_once = fit(size, rollout, memory=device.memory).sampled_rows
        except TooLarge as error:
            print(f"{size.name}: {error}")
            continue
        parts = works(size, rollout, sampled_rows=at_once)
        seconds = {part: iterations * work.seconds(rates) for part, work in parts.items()}
        shown = ", ".join(f"{part} {each:.3g}" for part, each in seconds.items())
        responses = iterations * rollout.responses
        print(f"{size.name}, {responses:,} responses: {sum(seconds.values()):.4g} s ({shown})")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["0.5b", "1.5b"], metavar="NAME")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    default = Rollout()
    parser.add_argument("--prompts", type=int, default=default.prompts)
    parser.add_argument("--samples", type=int, default=default.samples, help="responses to each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=default.prompt_tokens)
    parser.add_argument("--response-tokens", type=int, default=default.response_tokens)
    parser.add_argument("--minibatches", type=int, default=default.minibatches, help="optimiser steps")
    parser.add_argument("--warmup", type=int, default=1, help="iterations")
    parser.add_argument("--measured", type=int, default=3, help="iterations")
    parser.add_argument(
        "--skip-plain", action="store_true", help="do not sample without CUDA graphs, which takes long"
    )
    parser.add_argument("--json", type=Path, help="where all numbers are written")
    parser.add_argument(
        "--peers-python", type=Path, help="an interpreter with TRL, such as `make bench` makes"
    )
    parser.add_argument("--trl-rows", type=int, default=8, help="responses in a pass of TRL's")
    parser.add_argument(
        "--floor", choices=GPUS, help="print floors by this device's data sheet, and measure nothing"
    )
    parser.add_argument("--iterations", type=int, default=1, help="that --floor counts")
    return parser


if __name__ == "__main__":
    main()
