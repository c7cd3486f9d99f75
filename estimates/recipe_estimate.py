"""Estimate a whole recipe: every stage on one layout, and the smallest layout in which each stage fits."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from vantage.estimates.devices import Device, device_named
from vantage.estimates.engine_timing import on_ranks, sampled, seconds_of_engine, tokens_per_second
from vantage.estimates.fewer_gpus import Faster, faster_with_fewer
from vantage.estimates.layouts import (
    RESERVE,
    Layout,
    Memory,
    fitted,
    largest_microbatch,
    memory_of,
    smallest_layout,
)
from vantage.estimates.model_shape import ModelShape, model_shape
from vantage.estimates.stage_workloads import workload_of
from vantage.estimates.timing import flops_of, seconds_of
from vantage.estimates.token_counts import (
    DataCount,
    Lengths,
    collected_pairs,
    count_data,
    mixed,
    token_counter,
)
from vantage.estimates.workload import Engine, Workload
from vantage.estimates.workload_parts import Subject
from vantage.models.model_config import read_config
from vantage.schemas.checks.engines import sampling_of, server_processes_of
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.evaluations import BenchmarkEvaluation
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe
from vantage.schemas.recipe.sources import Builtin, Registered
from vantage.schemas.recipe.stage import Resources, Stage
from vantage.schemas.recipe.stages import samples_ahead
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.schemas.steps import OTHER_MODEL_PREFIX, content_of, ordered_steps

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """vLLM's part of a stage; no GPU was measured for these numbers."""

    place: str
    """``process``, ``servers`` or ``url``."""
    engines: int
    gpus_of_each: int
    """GPUs that each vLLM needs; if these are more than it has, its weights do not fit there."""
    tensor_parallel: int
    """GPUs that each vLLM has: ``rollout.tensor_parallel``."""
    rows: float
    """Mean number of responses that one of them samples at once; the least of the stage's samplings."""
    tokens_per_second: float
    """Sampled tokens per second of all vLLMs, without the time of new weights."""
    sampling: float
    """Seconds of sampling."""
    sending: float
    """Seconds until the engines have new weights, summed over all updates."""


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """One stage on one layout."""

    name: str
    kind: str
    workload: Workload
    layout: Layout
    microbatch_size: int | None
    """The largest micro-batch that fits, over all GPUs; None: not even one row per GPU fits."""
    memory: Memory
    """Memory with that micro-batch, or with the recipe's own if nothing fits."""
    flops: float
    seconds: float
    seconds_in_bfloat16: float | None
    """Seconds with ``precision: bfloat16``; None: the stage already has it, or the device is a CPU."""
    smallest: tuple[Layout, int] | None
    """The layout with the fewest GPUs in which the stage fits, and its micro-batch there."""
    faster: Faster | None = None
    """A layout with fewer GPUs on which the stage is faster; None: there is none."""
    vllm: Vllm | None = None
    """vLLM that samples the stage's responses; None: the loop does."""

    @property
    def fits(self) -> bool:
        """Return whether the stage leaves the reserve free."""
        return self.microbatch_size is not None

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs of the layout and of the stage's own servers, for the duration of the stage."""
        servers = 0 if self.workload.engine is None else self.workload.engine.own_gpus
        return self.seconds * (self.layout.world + servers) / HOUR

    def as_json(self, price: float | None) -> dict[str, Any]:
        """Return bytes and seconds, and money if a price is given."""
        return {
            "stage": self.name,
            "kind": self.kind,
            "layout": asdict(self.layout),
            "fits": self.fits,
            "microbatch_size": self.microbatch_size,
            "networks": [
                {"role": each.role, "weights": each.weights, "is_trained": each.is_trained}
                for each in self.workload.networks
            ],
            "memory_bytes": {name: round(value) for name, value in asdict(self.memory).items()},
            "flops": self.flops,
            "seconds": self.seconds,
            "seconds_in_bfloat16": self.seconds_in_bfloat16,
            "gpu_hours": self.gpu_hours,
            "cost": None if price is None else price * self.gpu_hours,
            "smallest": None
            if self.smallest is None
            else {**asdict(self.smallest[0]), "microbatch_size": self.smallest[1]},
            "faster_with_fewer_gpus": None if self.faster is None else asdict(self.faster),
            "counts": self.workload.counts,
            "vllm": None if self.vllm is None else asdict(self.vllm),
            "asked": [each.as_json() for each in self.workload.asked],
            "basis": list(self.workload.basis),
        }


@dataclass(frozen=True, kw_only=True)
class RecipeEstimate:
    """All stages of a recipe, in the order in which they run."""

    recipe: str
    shape: ModelShape
    device: Device
    stages: tuple[StageEstimate, ...]
    price: float | None
    """Price of one GPU for one hour."""
    response_basis: str
    """Source of the assumed length of sampled responses."""

    def as_json(self) -> dict[str, Any]:
        """Return the output of ``vantage estimate --json``."""
        return {
            "recipe": self.recipe,
            "weights": self.shape.weights,
            "model_note": self.shape.note,
            "device": {**asdict(self.device), "reserve": RESERVE},
            "response_basis": self.response_basis,
            "stages": [stage.as_json(self.price) for stage in self.stages],
            "seconds": sum(stage.seconds for stage in self.stages),
            "cost": None
            if self.price is None
            else self.price * sum(stage.gpu_hours for stage in self.stages),
        }


def estimate_recipe(
    recipe: Recipe,
    *,
    gpu: str,
    gpus: int | None = None,
    nodes: int | None = None,
    price: float | None = None,
    notes: Sequence[str] = (),
) -> RecipeEstimate:
    """Estimate every stage on ``nodes`` nodes of ``gpus`` GPUs each; None: as many as its ``resources`` ask for.

    The strategy of several GPUs is that of ``resources.distributed`` if their number comes from ``resources``; else
    ddp, or fsdp2 if ddp does not fit. ``notes``: remarks on the models for the reader.

    Raises:
        vantage.models.model_config.UnreadableConfig: the model's configuration is not on this machine.
        ValueError: a dataset cannot be counted, or there is no such GPU.
    """
    config = read_config(recipe.model.whole)
    shape = model_shape(config)
    others, remarks = _other_shapes(recipe)
    remarks += [
        f"{name} is not counted: its texts are in the files of a benchmark"
        for name, stage in recipe.stages.items()
        if isinstance(stage, BenchmarkEvaluation)
    ]
    shape = replace(shape, note="; ".join(filter(None, [shape.note, *notes, *remarks])))
    is_builtin = isinstance(recipe.model.origin, Builtin)
    counter, counted_by = token_counter(config.folder, is_character_model=is_builtin)
    resolved = ResolvedRecipe.of(
        with_learning_rates(recipe, width=shape.hidden_size)
    )  # an estimate does not depend on the learning rates

    @cache
    def counted(name: str) -> DataCount:
        if name in resolved.mixtures:
            mixture = resolved.mixtures[name]
            return mixed(mixture, [counted(part) for part in mixture.parts], content_of(resolved, name))
        return count_data(resolved, name, counter, counted_by=counted_by)

    sampled, response_basis = _sampled_lengths(resolved, counted)

    def data_of(name: str) -> DataCount:
        if name in resolved.data or name in resolved.mixtures:
            return counted(name)
        read, is_sampled = _dataset_behind(resolved, name)
        return collected_pairs(data_of(read), sampled) if is_sampled else data_of(read)

    device = device_named(gpu, width=shape.hidden_size)
    stages = tuple(
        _estimate_stage(
            Subject(resolved, name, shape, data_of, sampled, others, finds_rows=not device.is_cpu),
            device,
            gpus=gpus,
            nodes=nodes,
        )
        for name in ordered_steps(resolved)
        if name in resolved.stages and KINDS[resolved.stages[name].kind].workload is not None
    )
    return RecipeEstimate(
        recipe=recipe.recipe,
        shape=shape,
        device=device,
        stages=stages,
        price=price,
        response_basis=response_basis,
    )


def _other_shapes(recipe: Recipe) -> tuple[dict[str, ModelShape], list[str]]:
    """Return step that imports another model → its shape, and remarks on models whose configuration is not on this machine."""
    shapes, notes = {}, []
    for name, other in recipe.models.items():
        step = f"{OTHER_MODEL_PREFIX}{name}"
        try:
            if isinstance(other.origin, Registered):
                raise ValueError("MLflow is not asked for an estimate")
            shapes[step] = model_shape(read_config(other.whole))
        except ValueError as error:
            notes.append(f"{step} is counted as if it were the recipe's model: {error}")
        else:
            notes += [f"{step}: {shapes[step].note}"] if shapes[step].note else []
    return shapes, notes


def _choices(resources: Resources, gpus: int | None, nodes: int | None, *, servers: int) -> list[Layout]:
    """Return the layouts to try, in order: those of the options, else the one of the stage's resources.

    Args:
        servers: GPUs of each node on which servers of the stage run, and no rank.
    """
    strategies: tuple[Literal["ddp", "fsdp2"], ...] = ("ddp", "fsdp2")
    if gpus is None and nodes is None:
        strategies = (resources.distributed.strategy,)
    gpus = gpus or resources.gpus or resources.distributed.ranks or 1
    gpus = max(1, gpus - servers)
    nodes = nodes or resources.most_nodes
    return [Layout(1)] if gpus * nodes == 1 else [Layout(gpus, nodes, strategy) for strategy in strategies]


def _estimate_stage(
    subject: Subject, device: Device, *, gpus: int | None, nodes: int | None
) -> StageEstimate:
    engine = _engine_of(subject.stage, nodes)
    workload = replace(workload_of(subject), engine=engine)
    choices = _choices(subject.stage.resources, gpus, nodes, servers=server_processes_of(subject.stage))
    layout, size = choices[-1], None
    for layout in choices:
        size = largest_microbatch(workload, layout, device)
        if size is not None:
            break
    shown = workload if size is None else fitted(workload, size, layout, device)
    return StageEstimate(
        name=subject.name,
        kind=subject.stage.kind,
        workload=shown,
        layout=layout,
        microbatch_size=size,
        memory=memory_of(shown, layout, device),
        flops=flops_of(shown),
        seconds=seconds_of(shown, layout, device),
        seconds_in_bfloat16=None
        if shown.is_bfloat16 or device.is_cpu
        else seconds_of(replace(shown, is_bfloat16=True), layout, device),
        smallest=smallest_layout(workload, device),
        faster=faster_with_fewer(workload, layout, device),
        vllm=_vllm(on_ranks(shown, world=layout.world, is_sharded=layout.is_sharded), device),
    )


def _engine_of(stage: Stage, nodes: int | None) -> Engine | None:
    """Return the vLLMs that sample for a stage on this many nodes; None: the loop samples, or nothing is sampled."""
    sampling = sampling_of(stage)
    if sampling is None or sampling.engine != "vllm":
        return None
    nodes = nodes or stage.resources.most_nodes
    is_beside = samples_ahead(stage)
    if sampling.url is not None:
        return Engine(place="url", count=len(sampling.url), max_rows=sampling.max_rows, is_beside=is_beside)
    if sampling.servers is not None:
        count = sampling.servers * nodes
        return Engine(
            place="servers",
            count=count,
            max_rows=sampling.max_rows,
            is_beside=is_beside,
            tensor_parallel=sampling.tensor_parallel,
        )
    return Engine(place="process", count=1, max_rows=sampling.max_rows)


def _vllm(workload: Workload, device: Device) -> Vllm | None:
    engine = workload.engine
    if engine is None or not workload.samplings:
        return None
    sampling, sending = seconds_of_engine(workload, device)
    each = [sampled(sampling, workload, engine, device) for sampling in workload.samplings]
    return Vllm(
        place=engine.place,
        engines=engine.count,
        gpus_of_each=max(found.gpus for found in each),
        tensor_parallel=engine.tensor_parallel,
        rows=min(found.rows for found in each),
        tokens_per_second=tokens_per_second(workload, device) or 0.0,
        sampling=sampling,
        sending=sending,
    )


def _dataset_behind(recipe: Recipe, name: str) -> tuple[str, bool]:
    """Return the dataset that a collecting stage reads, and whether it samples responses to its prompts.

    A stage that makes rows of the same content as it reads samples none: at most, it keeps all rows.
    """
    stage = recipe.stages[name]
    kind = KINDS[stage.kind]
    for field, content in kind.data.items():
        if (dataset := getattr(stage, field)) is not None:
            return dataset, content != kind.content
    raise ValueError(f"stages.{name}: a {stage.kind} stage reads no dataset, so its rows cannot be counted")


def _sampled_lengths(recipe: ResolvedRecipe, counted: Callable[[str], DataCount]) -> tuple[Lengths, str]:
    """Return the lengths of the demonstrations that the policy imitates; without demonstrations, the limit."""
    for stage in recipe.stages.values():
        if isinstance(stage, SupervisedFineTuning):
            data = counted(stage.data)
            if "not here" not in data.basis:
                return data.responses[0], f"responses are as long as those of data.{stage.data}"
    limit = recipe.generation.max_response_tokens
    return Lengths((limit,)), f"responses are as long as generation.max_response_tokens={limit}"
