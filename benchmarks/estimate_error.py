"""Measure how far `vantage estimate` is off for the stages of two small models on one thread of the CPU.

    python -m benchmarks.estimate_error --workspace /tmp/estimate_error

It measures the stage's own CPU seconds, and the most resident memory of its process less what it had when the stage
began, with torch and transformers loaded and used once. Both are of one run. Prints a table in Markdown.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peak_memory import PeakMemory, use_libraries
from vantage.schemas.records.job import StageJob, StageResult

if TYPE_CHECKING:
    from vantage.runs.workspace import Workspace
    from vantage.schemas.recipe.recipe import ResolvedRecipe

MEASURED = "measured.jsonl"
"""File of the workspace to which stages append what they measured."""
MODELS = ("quickstart", "small_llama")
SMALL_LLAMA = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
REDUCED = (
    "data.demonstrations.rows=4000",
    "data.preferences.rows=3000",
    "stages.value.iterations=3",
    "stages.value.validate_every=3",
    "stages.policy.iterations=4",
    "stages.policy.validate_every=4",
    "stages.reward.gate.at_least=0.0",
    "stages.value.gate.at_least=-1000",
    "stages.evaluation.gate.at_least=-1",
)
SMALLER = (
    "data.demonstrations.rows=600",
    "data.preferences.rows=300",
    "data.prompts.split={validation: 64, test: 64}",
    "stages.value.iterations=1",
    "stages.value.batch_size=64",
    "stages.value.validation_samples=64",
    "stages.policy.iterations=1",
    "stages.policy.batch_size=64",
    "stages.policy.validation_samples=64",
)


def measured_stage(job: StageJob) -> StageResult:
    """Run one attempt at a stage as ``vantage.tasks.stages.run_stage`` does, and append its seconds and bytes to a
    file.
    """
    from vantage.tasks.stages import run_stage

    use_libraries()
    memory, start = PeakMemory(), time.process_time()
    result = run_stage(job)
    measured = {
        "stage": job.name,
        "seconds": time.process_time() - start,
        "bytes": memory.bytes,
    }
    with (job.scratch.parents[2] / MEASURED).open("a") as file:
        file.write(json.dumps(measured) + "\n")
    return result


def make_small_llama(folder: Path) -> None:
    """Write a Llama of 7 million random weights, with the built-in model's tokenizer."""
    import torch
    from transformers import LlamaForCausalLM

    from vantage.models.builtin import builtin_config, write_tokenizer

    config = builtin_config("tiny")
    config.update({**SMALL_LLAMA, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)


def host_seconds() -> tuple[float, float]:
    """Return the seconds that starting the operations of one layer takes, in a forward pass and in forward and backward
    passes together. They are measured on layers of width 8, where the arithmetic itself takes next to nothing.
    """
    import torch
    from transformers import AutoModel, LlamaConfig

    torch.set_num_threads(1)
    ids = torch.zeros(1, 2, dtype=torch.long)

    def seconds(num_layers: int, *, trains: bool) -> float:
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=1,
            num_hidden_layers=num_layers,
        )
        model, taken = AutoModel.from_config(config), []
        for _ in range(60):
            start = time.process_time()
            with torch.set_grad_enabled(trains):
                output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            if trains:
                output.last_hidden_state.sum().backward()
            taken.append(time.process_time() - start)
        return statistics.median(taken)

    forward, both = (seconds(22, trains=trains) - seconds(2, trains=trains) for trains in (False, True))
    return forward / 20, both / 20


def measure_stages(
    recipe: "ResolvedRecipe", place: "Workspace", *, source: str, last: str | None = None
) -> dict[str, dict[str, Any]]:
    """Make the steps that are missing, one after the other; stage → what it took when it was made last.

    Args:
        last: the step to end after; None: all of them.
    """
    from tests.support.orchestrated import Witness
    from vantage.attempts.jobs import resources_of
    from vantage.attempts.machine import Machine
    from vantage.flows.orchestrator import Orchestrator
    from vantage.ledger.run_ledger import Ledger
    from vantage.runs.run import acquire_run
    from vantage.schemas.records.attempt import Share
    from vantage.storage.store import Store

    with acquire_run(place, recipe, source=source) as run:
        orchestrator = Orchestrator(
            run,
            store=Store(place.store),
            ledger=Ledger(None, place.root, recipe.recipe),
            watcher=Witness(),
            stage_function="benchmarks.estimate_error.measured_stage",
        )
        orchestrator.begin()
        for step in orchestrator.inputs:
            cpus, _ = Machine(cpus=1).share_of(resources_of(recipe, step))
            request = orchestrator.request(step, Share(cpus=cpus))
            if request is not None:
                record = orchestrator.attempt(request)
                assert record.digest is not None, record.reason
            if step == last:
                break
    file = place.root / MEASURED
    lines = file.read_text().splitlines() if file.exists() else []
    return {each["stage"]: each for each in map(json.loads, lines)}


def compare(name: str, overrides: Sequence[str], workspace: Path) -> Iterator[str]:
    """Run the quickstart with these overrides, and yield a line of the table for each stage."""
    from vantage.estimates.recipe_estimate import estimate_recipe
    from vantage.runs.resolving import load_resolved
    from vantage.runs.workspace import Workspace
    from vantage.schemas.loading.recipe_file import load_recipe

    place = Workspace(workspace / name)
    place.root.mkdir(parents=True, exist_ok=True)
    estimate = estimate_recipe(load_recipe("quickstart", overrides), gpu="cpu")
    resolved, _ = load_resolved("quickstart", overrides)
    measured = measure_stages(resolved, place, source="quickstart")
    for stage in estimate.stages:
        found = measured[stage.name]
        seconds, memory = found["seconds"], found["bytes"]
        yield (
            f"| {name} | {stage.name} | {stage.seconds:.1f} | {seconds:.1f} | {stage.seconds / seconds - 1:+.0%} "
            f"| {stage.memory.peak / 1e6:,.0f} | {memory / 1e6:,.0f} | {stage.memory.peak / memory - 1:+.0%} |"
        )


def main() -> None:
    """Run the console script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parser.parse_args()
    workspace: Path = arguments.workspace.absolute()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    model = workspace / "small_llama"
    if not model.is_dir():
        make_small_llama(model)
    print(
        "starting one layer's operations: {:.2g} s forward, {:.2g} s with the backward pass\n".format(
            *host_seconds()
        )
    )
    print("| model | stage | seconds: predicted | measured | error | MB: predicted | measured | error |")
    print("|---|---|---|---|---|---|---|---|")
    for name, overrides in {
        "quickstart": REDUCED,
        "small_llama": (*REDUCED, *SMALLER, f"model.source={model}"),
    }.items():
        if name not in arguments.models:
            continue
        for line in compare(name, overrides, workspace):
            print(line, flush=True)


if __name__ == "__main__":
    main()
