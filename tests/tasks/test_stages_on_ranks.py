"""Every kind of stage and every preset give on many gloo processes the weights, optimisers, metrics and rows of one."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tests.support.fork_server import WITH_TORCH
from tests.tasks import (
    test_best_of_n,
    test_distillation,
    test_dpo,
    test_dpo_losses,
    test_kto,
    test_presets_run,
    test_watch_by_model,
)
from tests.tasks.alike import ADAM_EPS, assert_alike, assert_alike_weights, run_to_compare
from tests.tasks.other_family import train_other_reward
from vantage.ledger.journal import read
from vantage.schemas.kinds import resolve_work
from vantage.schemas.metric_names import PASSES, SAMPLING, SPEED
from vantage.schemas.recipe.critic_head import CriticHead
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.rewards import Judge, Reward
from vantage.schemas.recipe.rollout import Ahead
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection
from vantage.schemas.recipe.terms import ModelTerm
from vantage.schemas.recipe.watch import Watch
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.rows import read_rows
from vantage.tasks.training.checkpoint_folders import committed
from vantage.tasks.training.checkpoints import load
from vantage.tasks.training.optimization import EPS
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL

pytestmark = pytest.mark.slow

SECONDS = 600
"""The most that the processes may take; on an idle core they take 40."""
BRIEF = Generation(max_prompt_tokens=48, max_response_tokens=12)

Job = Callable[[Any, Path], StageJob]
"""Function of the small pipeline and a folder that returns the job."""


def of_kind(name: str, **changes: Any) -> Job:
    def job(pipeline: Any, folder: Path) -> StageJob:
        found: StageJob = pipeline.job(name, folder=folder, **changes)
        return found.model_copy(update={"work": resolve_work(found.work)})

    return job


def briefly(job: Job) -> Job:
    """Return the job with responses of half the length: to sample them takes most of its time."""

    def brief(pipeline: Any, folder: Path) -> StageJob:
        return job(pipeline, folder).model_copy(update={"generation": BRIEF})

    return brief


def of_preset(name: str, **changes: Any) -> Job:
    def job(pipeline: Any, folder: Path) -> StageJob:
        found = test_presets_run.job_of(test_presets_run.CASES[name], pipeline, folder)
        return found.model_copy(update={"work": found.work.model_copy(update=changes)})

    return job


def always(metric: str, action: str) -> Guard:
    """Return a guard that fires in the first iteration: the metric is never negative."""
    return Guard.model_validate({"metric": metric, "above": -1.0, "over": 1, "action": action})


def pairs(pipeline: Any, folder: Path) -> StageJob:
    job: StageJob = pipeline.job("evaluation", folder=folder)
    work = PreferenceCollection(
        kind="preference_collection",
        policy="sft",
        prompts="prompts",
        judge=Judge(reward="main"),
        samples_per_prompt=4,
        batch_size=44,
    )
    inputs = {
        "policy": job.inputs["baseline"],
        "prompts": job.inputs["prompts"],
        "reward.main.0": pipeline.folder("reward"),
    }
    rewards = {"main": Reward(terms=(ModelTerm(model="reward"),))}
    changes = {"work": resolve_work(work), "inputs": inputs, "rewards": rewards, "name": "pairs"}
    return job.model_copy(update=changes)


def collected_value(pipeline: Any, folder: Path) -> StageJob:
    job = of_kind("value", microbatch_size=2, iterations=2, rollouts="collected", fresh_share=0.5)(
        pipeline, folder
    )
    return job.model_copy(update={"inputs": {**job.inputs, "rollouts": pipeline.folder("collected")}})


def best_of_n(pipeline: Any, folder: Path) -> StageJob:
    return test_best_of_n.job_in(pipeline, folder, iterations=2)


def distillation(pipeline: Any, folder: Path) -> StageJob:
    return test_distillation.job_in(pipeline, folder, iterations=2, microbatch_size=2)


def dpo(pipeline: Any, folder: Path) -> StageJob:
    return test_dpo.job_in(pipeline, folder, reference="model", microbatch_size=2)


def other_loss(name: str) -> Job:
    return lambda pipeline, folder: test_dpo_losses.job_of(pipeline, folder, name=name, microbatch_size=2)


def kto(pipeline: Any, folder: Path) -> StageJob:
    labelled = test_kto.write_labelled(pipeline, folder / "labelled")
    return test_kto.job_in(pipeline, labelled, folder, reference="model", microbatch_size=3)


def monitored(pipeline: Any, folder: Path) -> StageJob:
    """Return a policy stage that measures demonstrations and the reward's own data."""
    data = {role: role for role in ("demonstrations", "preferences")}
    job = of_kind("policy", microbatch_size=2, iterations=2, **data)(pipeline, folder)
    return job.model_copy(update={"inputs": job.inputs | {role: pipeline.folder(role) for role in data}})


def two_families(pipeline: Any, folder: Path) -> StageJob:
    """Return a policy stage whose reward model has another tokenizer, and that compares it with the data that it was trained on."""
    job = of_kind("policy", microbatch_size=2, iterations=2, preferences="preferences")(pipeline, folder)
    inputs = {
        "reward.main.0": train_other_reward(pipeline, folder / "base"),
        "preferences": pipeline.folder("preferences"),
    }
    return job.model_copy(update={"inputs": job.inputs | inputs})


def watched_by_a_model(pipeline: Any, folder: Path) -> StageJob:
    watch = Watch(judge=test_watch_by_model.BY_MODEL, every=1, on_fall="warn")
    changes = {"iterations": 2, "microbatch_size": 3, "learning_rate": 1e-3, "validate_every": 1}
    job = test_watch_by_model.job_of(pipeline, watch, folder, **changes)
    return job.model_copy(update={"work": resolve_work(job.work)})


UNEQUAL = (
    *("fresh critic", "shared trunk", "trust region", "full KL in the loss", "dapo", "vapo", "sao"),
    *("frozen critic", "ensemble"),
)
"""Cases of presets that three ranks do as well, each with other numbers of rows and passes."""

CASES: dict[int, dict[str, Job]] = {
    2: {name: of_preset(name) for name in test_presets_run.PRESET_CASES}
    | {
        "sampled ahead": of_preset("grpo", rollout=Ahead(ahead=1)),
        "quantiles": of_preset("quantiles", microbatch_size=1),
        **{
            f"value with {name}": briefly(of_kind("value", microbatch_size=3, iterations=2, head=head))
            for name, head in (
                ("quantiles", CriticHead(quantiles=4)),
                ("an ensemble", CriticHead(ensemble=2)),
            )
        },
        "moments too small for 8 bits": of_kind("sft", microbatch_size=3, optimizer_states="8bit"),
        "networks and moments in host memory": briefly(
            of_kind("policy", iterations=2, resources=Resources(offload=("reference", "reward", "optimizer")))
        ),
        # the first rank asks the guards, and the other does the same
        "ended by a guard": briefly(
            of_kind("policy", iterations=3, guards=(always("grad_norm_policy", "finish"),))
        ),
        "frozen by a guard": briefly(
            of_kind("policy", iterations=2, guards=(always("value_loss", "freeze_policy"),))
        ),
    },
    # neither 16 nor 8 nor 4 rows divide by 3, and micro-batches of 2 give the ranks unequal numbers of passes
    3: {
        "sft": of_kind("sft", microbatch_size=3),
        "reward": of_kind("reward", microbatch_size=2),
        "value": briefly(of_kind("value", microbatch_size=2, iterations=2)),
        "evaluation": briefly(of_kind("evaluation")),
        "pairs": briefly(pairs),
        "collected": of_kind("collected", microbatch_size=16),
        "value of collected responses": collected_value,
        "best of n": briefly(best_of_n),
        "distillation": briefly(distillation),
        "dpo": dpo,
        "simpo": other_loss("simpo"),
        "orpo": other_loss("orpo"),
        "kto": kto,
        "monitored": briefly(monitored),
        "two families": briefly(two_families),
        "watched by a model": briefly(watched_by_a_model),
        **{name: of_preset(name, microbatch_size=1) for name in UNEQUAL},
    },
}
EVERY_CASE = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


@dataclass(frozen=True)
class Ran:
    """A case that has run, with its result."""

    job: StageJob
    result: StageResult


@pytest.fixture(scope="module")
def on_ranks(
    pipeline: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, list[Ran]]]:
    """Return a function from a number of ranks to every case's result on each of them."""
    done: dict[int, dict[str, list[Ran]]] = {}

    def run(world_size: int) -> dict[str, list[Ran]]:
        if world_size not in done:
            folder = tmp_path_factory.mktemp(f"ranks-{world_size}")
            jobs = {
                name: case(pipeline, folder / str(number))
                for number, (name, case) in enumerate(CASES[world_size].items())
                if not (folder / str(number)).mkdir()
            }
            start(world_size, folder / "jobs", list(jobs.values()), eps=ADAM_EPS)
            done[world_size] = {
                name: [Ran(job, result_of(job, rank)) for rank in range(world_size)]
                for name, job in jobs.items()
            }
        return done[world_size]

    return run


@pytest.fixture(scope="module")
def by_one_process(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Ran]:
    """Return a function of a number of ranks and of one of their cases: what one process makes of it, computed once."""
    done: dict[tuple[int, str], Ran] = {}

    def run(world_size: int, name: str) -> Ran:
        if (world_size, name) not in done:
            job = CASES[world_size][name](pipeline, tmp_path_factory.mktemp("one-process"))
            done[world_size, name] = Ran(job, run_to_compare(job))
        return done[world_size, name]

    return run


def start(
    world_size: int,
    file: Path,
    jobs: list[StageJob],
    *,
    strategy: str = "ddp",
    eps: float = EPS,
    memory: Sequence[Sequence[int]] = (),
) -> None:
    """Run the jobs on so many processes, and wait for them.

    Args:
        eps: AdamW's.
        memory: of each job, the bytes that each rank has; nothing: nobody counts them.
    """
    file.write_text("".join(f"{job.model_dump_json()}\n" for job in jobs))
    arguments = (str(world_size), str(file), strategy, str(eps), json.dumps(memory))
    ended = WITH_TORCH.run_main("tests.tasks.stages_on_ranks", *arguments, seconds=SECONDS)
    assert ended.returncode == 0, ended.stderr


def result_of(job: StageJob, rank: int) -> StageResult:
    return StageResult.model_validate_json((job.scratch / f"result-{rank}.json").read_bytes())


def moved(job: StageJob) -> dict[str, torch.Tensor]:
    """Return weights of everything that was trained, after the last step."""
    saved = committed(job.scratch / CHECKPOINTS)
    if not saved:
        return {}
    [file, *_] = sorted(saved[-1].folder.glob("tensors*.safetensors"))
    state = json.loads((saved[-1].folder / "state.json").read_bytes())["state"]
    parts = {name.partition("/")[0] for name in load_file(file)} | set(state)
    tensors = load(saved[-1], required=parts).tensors
    return {name: tensor for name, tensor in tensors.items() if ".weights/" in name}


def last_metrics(job: StageJob) -> dict[str, float]:
    return {
        name: value
        for entry in read(job.scratch / JOURNAL)
        for name, value in entry.metrics.items()
        if name not in (*SPEED, *PASSES, *SAMPLING)  # these depend on which rank computes which rows
    }


@pytest.mark.parametrize(("world_size", "name"), EVERY_CASE)
def test_ranks_give_the_weights_and_the_metrics_of_one_process(
    world_size: int, name: str, by_one_process: Any, on_ranks: Any
) -> None:
    alone: StageJob = by_one_process(world_size, name).job
    ran: list[Ran] = on_ranks(world_size)[name]

    weights, found = moved(alone), moved(ran[0].job)
    assert found.keys() == weights.keys()
    if weights:
        peak = getattr(alone.work, "learning_rate", 0.0)
        assert_alike_weights(found, weights, learning_rate=peak)
        assert last_metrics(ran[0].job) == pytest.approx(last_metrics(alone), rel=2e-3, abs=2e-4)
    for of_rank in ran:
        assert of_rank.result.metrics == ran[0].result.metrics, "every rank measures the same"
        expected = by_one_process(world_size, name).result.metrics
        assert_alike(of_rank.result.metrics, expected, rel=2e-3, abs=2e-4)


def test_every_response_is_judged_once_and_stands_in_its_row(by_one_process: Any, on_ranks: Any) -> None:
    """8 test prompts with 2 responses each, on 3 ranks; sampling is the same for any number of them."""
    alone: StageJob = by_one_process(3, "evaluation").job
    together: StageJob = on_ranks(3)["evaluation"][0].job
    for role in ("candidate", "baseline"):
        rows = read_rows(together.output, role)
        assert len(rows) == 16
        assert rows == read_rows(alone.output, role)


def test_every_prompt_gives_its_pair_once(by_one_process: Any, on_ranks: Any) -> None:
    alone: StageJob = by_one_process(3, "pairs").job
    together: StageJob = on_ranks(3)["pairs"][0].job
    for split in ("train", "validation", "test"):
        assert read_rows(together.output, split) == read_rows(alone.output, split)


def test_collected_responses_are_the_same_rows(pipeline: Any, on_ranks: Any) -> None:
    """Three ranks sample parts of each batch; ids, texts and ends are those of one process, log-probabilities up to rounding."""
    together: StageJob = on_ranks(3)["collected"][0].job
    for split in ("train", "validation", "test"):
        found, expected = (
            pa.ipc.open_file(pa.memory_map(str(folder / f"{split}.arrow"))).read_all()
            for folder in (together.output, pipeline.folder("collected"))
        )
        for column in ("prompt", "answer", "prompt_ids", "response", "response_ids", "ended"):
            assert found[column].to_pylist() == expected[column].to_pylist(), column
        assert found["score"].to_pylist() == pytest.approx(expected["score"].to_pylist(), abs=1e-4)


# -- weights spread over the ranks

SHARDED = (
    "sft",
    "reward",
    "vapo",
    "sao",
    "frozen critic",
    "ensemble",
    "shared trunk",
    "evaluation",
    "best of n",
    "collected",
    "monitored",
    "watched by a model",
    "orpo",
    "kto",
)


@pytest.fixture(scope="module")
def sharded(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StageJob]:
    """Return name → a stage that two ranks have done by FSDP2."""
    jobs = {}
    for name in SHARDED:
        folder = tmp_path_factory.mktemp("sharded")
        jobs[name] = CASES[3][name](pipeline, folder)
    start(2, tmp_path_factory.mktemp("jobs") / "jobs", list(jobs.values()), strategy="fsdp2", eps=ADAM_EPS)
    return jobs


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_ranks_give_the_weights_and_the_metrics_of_one_process(
    name: str, by_one_process: Any, sharded: dict[str, StageJob]
) -> None:
    """The checkpoint, a file for each rank, is read whole here, and the artifact has the same files."""
    alone: StageJob = by_one_process(3, name).job
    expected: StageResult = by_one_process(3, name).result
    job = sharded[name]
    weights, found = moved(alone), moved(job)
    assert found.keys() == weights.keys()
    if weights:
        peak = getattr(alone.work, "learning_rate", 0.0)
        assert_alike_weights(found, weights, learning_rate=peak)
        for file in alone.output.glob("*.safetensors"):
            assert load_file(job.output / file.name).keys() == load_file(file).keys()
    assert {file.name for file in job.output.iterdir()} == {file.name for file in alone.output.iterdir()}
    for rank in range(2):
        assert_alike(result_of(job, rank).metrics, expected.metrics, rel=2e-3, abs=2e-4)


def test_each_rank_reads_its_own_rows_alone(sharded: dict[str, StageJob]) -> None:
    """Together the ranks read the bytes of the weights once; neither reads more than half, but for weights of an odd
    number of rows.
    """
    job = sharded["sft"]
    weights = load_file(job.inputs["init"] / "model.safetensors")
    whole = sum(weight.numel() * weight.element_size() for weight in weights.values())
    read = [sum(json.loads((job.scratch / f"bytes-{rank}.json").read_text())) for rank in range(2)]
    assert sum(read) == whole
    assert max(read) <= 0.51 * whole


def test_a_sharded_checkpoint_is_read_by_another_number_of_ranks(
    pipeline: Any, sharded: dict[str, StageJob], tmp_path: Path
) -> None:
    """Three ranks read a checkpoint of two: nothing is left to train, and the artifact has the bytes of the two ranks'."""
    again = of_kind("sft", microbatch_size=3)(pipeline, tmp_path)
    shutil.rmtree(again.scratch)
    shutil.copytree(sharded["sft"].scratch, again.scratch)
    start(3, tmp_path / "jobs", [again], strategy="fsdp2", eps=ADAM_EPS)
    weights, expected = (load_file(job.output / "model.safetensors") for job in (again, sharded["sft"]))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
