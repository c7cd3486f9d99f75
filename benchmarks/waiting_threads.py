"""What torch's threads cost each other while they wait: a process alone, and two on the same CPUs, by GOMP_SPINCOUNT.

    python -m benchmarks.waiting_threads [--spins 2000 20000] [--seconds 5]

Prints milliseconds of a training step (8 x 64 tokens) and of sampling (64 x 16 tokens), a Llama of 4 layers of width 128 with
random weights, with as many threads as there are CPUs. "default" is libgomp's own.
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

WORKLOADS = ("train", "sample")


def measure(workload: str, *, threads: int, seconds: float) -> float:
    """Return the milliseconds of one step, in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)  # as stages do
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows, prompts = torch.randint(0, 64, (8, 64)), torch.randint(0, 64, (64, 32))

    def step() -> None:
        if workload == "sample":
            generate: Any = model.generate  # type: ignore[misc]  # transformers annotates self twice
            generate(prompts, max_new_tokens=16, min_new_tokens=16, do_sample=True, pad_token_id=0)
            return
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        step()
        steps += 1
    return 1000 * (time.perf_counter() - start) / steps


def measured_at_once(workload: str, spins: str, *, processes: int, threads: int, seconds: float) -> list[str]:
    """Return the milliseconds of a step in each of so many processes."""
    own = {} if spins == "default" else {"GOMP_SPINCOUNT": spins}
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.waiting_threads",
        "--measure",
        workload,
        "--seconds",
        str(seconds),
        "--threads",
        str(threads),
    ]
    started = [
        subprocess.Popen(
            command,
            env=environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(processes)
    ]
    return [process.communicate()[0].strip() for process in started]


def main() -> None:
    """Print the table, or one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spins", nargs="+", default=["2000", "20000"])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--measure", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(f"{measure(options.measure, threads=options.threads, seconds=options.seconds):.1f}")
        return
    cpus = len(os.sched_getaffinity(0))
    for workload in WORKLOADS:
        for spins, threads in (("default", 1), *((spins, cpus) for spins in ("default", *options.spins))):
            for processes in (1, 2):
                found = measured_at_once(
                    workload, spins, processes=processes, threads=threads, seconds=options.seconds
                )
                print(
                    f"{workload:6}  spins {spins:>7}  {threads} threads  {processes} at once: {', '.join(found)} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
