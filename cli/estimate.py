"""``vantage estimate``: estimate memory, time and cost of each stage, before anything runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Set, Source, Verbose
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from vantage.estimates.asked_servers import Asked
    from vantage.estimates.recipe_estimate import RecipeEstimate, StageEstimate, Vllm

GIGA, MEGA = 1e9, 1e6
MINUTE, HOUR = 60.0, 3600.0
FASTER = 0.9
"""Share of the time in float32 below which bfloat16 is recommended."""

Gpu = Annotated[
    str,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="GPU to estimate for: h100, h200, a100, l40s or 4090. cpu: this machine's CPU, whose speed is measured now.",
    ),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, help="GPUs of each node. Default: the stage's resources.")
]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Number of nodes. Default: the stage's resources.")
]
Price = Annotated[float | None, typer.Option("--price", min=0.0, help="Price of one GPU for one hour.")]


def estimate(
    recipe: Source,
    overrides: Set = None,
    gpu: Gpu = "cpu",
    gpus: Gpus = None,
    nodes: Nodes = None,
    price: Price = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Estimate memory, time and cost of each stage, and the fewest GPUs that it fits in. Runs nothing."""
    with explained(verbose):
        from vantage.estimates.recipe_estimate import estimate_recipe
        from vantage.runs.estimated_models import with_model_files
        from vantage.runs.names import recipe_source
        from vantage.schemas.loading.recipe_file import load_recipe

        loaded = load_recipe(recipe_source(recipe, "estimate"), overrides or [], needs_files=False)
        with with_model_files(loaded, workspace_at(workspace)) as (located, notes):
            found = estimate_recipe(located, gpu=gpu, gpus=gpus, nodes=nodes, price=price, notes=notes)
        if as_json:
            print_json(found.as_json())
        else:
            _show(found)


def _show(found: "RecipeEstimate") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from vantage.estimates.layouts import RESERVE
    from vantage.runs.console import open_console

    console = open_console()
    console.print(
        f"{found.recipe} · {found.shape.weights:,} parameters · {found.device.name} ({found.device.source})",
        markup=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    names = ("weights", "optimizer", "gradients", "activations", "sampling", "peak")
    for column in (
        "stage",
        "devices",
        *names,
        "time",
        *(["cost"] if found.price is not None else []),
        "fewest",
    ):
        table.add_column(column, justify="left" if column in ("stage", "devices", "fewest") else "right")
    for stage in found.stages:
        memory = stage.memory
        sizes = (
            memory.weights,
            memory.optimizer,
            memory.gradients,
            memory.activations,
            memory.kv_cache,
            memory.peak,
        )
        cost = [f"{found.price * stage.gpu_hours:,.2f}"] if found.price is not None else []
        table.add_row(
            stage.name,
            f"{stage.layout}{_servers(stage)}{'' if stage.fits else ': too small'}",
            *map(_size, sizes),
            f"{_duration(stage.seconds)}{'' if stage.vllm is None else '*'}",
            *cost,
            _smallest(stage.smallest, stage.workload.recipe_at_once),
        )
    console.print(table)
    seconds = sum(stage.seconds for stage in found.stages)
    total = "" if found.price is None else f", {found.price * sum(s.gpu_hours for s in found.stages):,.2f}"
    lines = [
        f"one stage after the other: {_duration(seconds)}{total}; memory is that of one device, of which {RESERVE:.0%} is left free"
    ]
    saving = [
        f"{stage.name} {_duration(stage.seconds_in_bfloat16)}"
        for stage in found.stages
        if stage.seconds_in_bfloat16 is not None and stage.seconds_in_bfloat16 < FASTER * stage.seconds
    ]
    if saving:
        lines.append(
            f"with precision: auto and resources.gpus, in bfloat16: {', '.join(saving)} (docs/precision.md)"
        )
    if any(stage.vllm is not None for stage in found.stages):
        lines.append(
            "* the time of vLLM's sampling is from a roofline model that was compared with no GPU (docs/estimate):"
        )
    lines += [
        f"  {stage.name}: {_by_vllm(stage.vllm, stage.layout.nodes)}"
        for stage in found.stages
        if stage.vllm is not None
    ]
    lines += [
        f"{stage.name} takes {_duration(stage.seconds)} on {stage.layout}, and {_duration(stage.faster.seconds)} on "
        f"{stage.faster.layout}: {stage.faster.reason}"
        for stage in found.stages
        if stage.faster is not None
    ]
    lines += [f"{stage.name} asks {_asked(each)}" for stage in found.stages for each in stage.workload.asked]
    basis = dict.fromkeys(line for stage in found.stages for line in stage.workload.basis)
    for line in (*lines, *filter(None, [found.shape.note]), found.response_basis, *basis):
        console.print(f"  {line}", markup=False)


def _servers(stage: "StageEstimate") -> str:
    """Return the GPUs on which only servers of the stage run: `` + 2 vllm``."""
    engine = stage.workload.engine
    return f" + {engine.own_gpus} vllm" if engine is not None and engine.own_gpus else ""


def _by_vllm(found: "Vllm", nodes: int) -> str:
    """Return vLLM's part in a stage on ``nodes`` nodes, in one line."""
    each = " each" if found.engines > 1 else ""
    if found.place == "process":
        who = f"in each of {found.engines} processes" if found.engines > 1 else "in the stage's process"
    else:
        who = f"on {found.engines} servers" if found.engines > 1 else "on one server"
    line = f"{found.tokens_per_second:,.0f} tokens/s {who}, {found.rows:,.0f} rows at once{each}, {_duration(found.sampling)}"
    if found.sending:
        line += f", and {_duration(found.sending)} until new weights are there"
    if found.place == "process" and nodes > 1:
        return f"{line}; a recipe for {nodes} nodes is refused with it: use rollout.servers"
    if found.gpus_of_each == found.tensor_parallel:
        return line
    if found.place == "url":
        return f"{line}; each server is counted with {found.gpus_of_each} GPUs (tensor parallel), which no cost contains"
    has = "one" if found.tensor_parallel == 1 else str(found.tensor_parallel)
    return (
        f"{line}, if it had {found.gpus_of_each} GPUs: its weights leave no room on {has}, and vLLM has {has} there; use rollout.servers with "
        f"rollout.tensor_parallel: {found.gpus_of_each}"
    )


def _asked(asked: "Asked") -> str:
    """Return the questions to a server, in one line."""
    model = getattr(asked.server, "model", None)
    named = asked.server.name if model is None else f"{asked.server.name} ({model})"
    parts = [f"{named} about {asked.responses:,.0f} responses in at most {asked.requests:,.0f} requests"]
    if asked.question_tokens is not None and asked.answer_tokens is not None:
        least, most = asked.answer_tokens
        parts.append(
            f"about {asked.question_tokens:,.0f} tokens of questions and {least:,.0f} to {most:,.0f} of answers"
        )
        least_cost, most_cost = asked.cost or (None, None)
        parts.append(
            "the recipe gives no price"
            if least_cost is None
            else f"{least_cost:,.2f} to {most_cost:,.2f} by its price"
        )
    if asked.least_seconds is not None:
        parts.append(
            f"at least {_duration(asked.least_seconds)} at {asked.server.requests_per_minute:g} requests a minute"
        )
    return "; ".join(parts)


def _smallest(smallest: "tuple[object, int] | None", at_once: int) -> str:
    if smallest is None:
        return "nothing"
    layout, size = smallest
    return str(layout) if size >= at_once else f"{layout}, {size} at once"


def _size(value: float) -> str:
    """Return a size with three digits, in MB or GB."""
    if not value:
        return ""
    return f"{value / GIGA:,.1f} GB" if value >= GIGA else f"{value / MEGA:,.0f} MB"


def _duration(seconds: float) -> str:
    if seconds >= HOUR:
        return f"{seconds / HOUR:,.1f} h"
    return f"{seconds / MINUTE:.1f} min" if seconds >= MINUTE else f"{seconds:.1f} s"
