"""Every stage with adapters writes, resumes and shares them, and never changes the model beneath."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.test_adapters import storages
from tests.tasks.alike import ADAM_EPS, assert_alike, assert_alike_weights, run_to_compare
from tests.tasks.kills import killed_in
from tests.tasks.test_stages_on_ranks import briefly, of_kind, result_of, start
from vantage.models.adapter_check import WEIGHTS
from vantage.models.adapters import base_of
from vantage.models.folders import load_policy
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.stages import run_stage
from vantage.tasks.training.checkpoints import latest
from vantage.tasks.training.scratch import CHECKPOINTS
from vantage.tasks.updates.actor_critic import load_actor_critic

CPU = torch.device("cpu")
Contents = Callable[[Path], dict[str, bytes]]
TRAINED = ["sft", "reward", "value", "policy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_stage_writes_adapters_alone_and_says_what_they_stand_on(name: str, lora_pipeline: Any) -> None:
    before = {path.name: path.read_bytes() for path in lora_pipeline.folder("model").iterdir()}
    folder = lora_pipeline.folder(name)
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", WEIGHTS, "base.json", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "config.json"}
    digest = base_of(folder)
    assert digest is not None and digest == lora_pipeline.result(name).base
    assert digest == lora_pipeline.job(name).digests["init" if name == "sft" else "init.base"]
    assert before == {path.name: path.read_bytes() for path in lora_pipeline.folder("model").iterdir()}
    # each goes on from the stage before: it has moved, and from there
    start = {"sft": None, "reward": "sft", "value": "reward", "policy": "sft"}[name]
    b = [key for key in load_file(folder / WEIGHTS) if "lora_B" in key]
    assert any(load_file(folder / WEIGHTS)[key].any() for key in b)
    if start:
        old, new = load_file(lora_pipeline.folder(start) / WEIGHTS), load_file(folder / WEIGHTS)
        assert old.keys() == new.keys() and any(not torch.equal(old[key], new[key]) for key in old)
        assert all((old[key] - new[key]).abs().max() < 0.1 for key in old)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_stage_with_adapters_that_is_killed_and_run_again_gives_the_same_bytes(
    name: str, lora_pipeline: Any, contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(lora_pipeline.folder(name))
    with killed_in(3, monkeypatch):
        run_stage(lora_pipeline.job(name, folder=tmp_path))
    kept = latest(tmp_path / "scratch" / CHECKPOINTS)
    assert kept is not None
    tensors = load_file(kept.folder / "tensors.safetensors")
    frozen = [key for key in tensors if ".weights/" in key and not (".lora_" in key or "head." in key)]
    assert frozen == [], "checkpoints hold what is trained, and its optimiser's state"
    assert any(key.startswith("best/") and ".lora_B." in key for key in tensors) == (
        name in ("value", "policy")
    )
    job = lora_pipeline.job(name, folder=tmp_path)
    assert run_stage(job) == lora_pipeline.results[name]
    assert contents(job.output) == whole


@pytest.mark.slow
def test_an_evaluation_compares_adapters_on_one_base(lora_pipeline: Any) -> None:
    metrics = lora_pipeline.metrics("evaluation")
    assert 0 <= metrics["accuracy"] <= 1


@pytest.mark.slow
def test_policy_reference_critic_and_reward_model_cost_little_more_than_one_model(
    lora_pipeline: Any, pipeline: Any
) -> None:
    def held(pipe: Any) -> int:
        job = pipe.job("policy")
        networks = load_actor_critic(job, CPU)
        scores = networks.models.scorer.terms[0].scores
        return storages(networks.policy, networks.critic, networks.models.reference, scores.model)

    one = storages(load_policy(pipeline.folder("model")))
    assert held(pipeline) > 3.9 * one
    # and four adapters; on 32 columns rank 4 is much, on 4096 rank 16 is a thirtieth of that
    adapter = (lora_pipeline.folder("sft") / "adapter_model.safetensors").stat().st_size
    assert held(lora_pipeline) < 1.02 * (one + 4 * adapter)


def test_the_reference_is_the_base_with_the_adapter_off(lora_pipeline: Any) -> None:
    """The policy starts at the imported model, so log-probabilities do not differ before the first step."""
    job = lora_pipeline.job("policy")
    model, sft = lora_pipeline.folder("model"), lora_pipeline.folder("sft")
    started = job.inputs | {"init": model, "reference": model}
    started.pop("init.base"), started.pop("reference.base")
    networks = load_actor_critic(job.model_copy(update={"inputs": started}), CPU)
    reference = networks.models.reference
    assert reference is not None
    mine = {id(each) for each in networks.policy.parameters()}
    assert all(id(each) in mine for each in reference.parameters()), "not a byte of its own"
    ids = torch.tensor([[1, 5, 9, 30]])
    with torch.no_grad():
        logits = [each.causal_lm(ids).logits for each in (networks.policy, reference)]
        of_sft = load_stored_policy(ModelFiles(sft, model), training="nothing")(ids).logits
    assert torch.equal(*logits) and torch.equal(logits[0], load_policy(model)(ids).logits)
    assert not torch.allclose(of_sft, logits[0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward", "policy"])
def test_a_stage_that_trains_all_weights_merges_the_adapters_that_it_starts_from(
    name: str, lora_pipeline: Any
) -> None:
    job = lora_pipeline.job(name, lora=False, epochs=1 if name == "policy" else 0.05)
    result = run_stage(job)
    assert result.base is None
    names = {path.name for path in job.output.iterdir()}
    assert "model.safetensors" in names and not names & {"adapter_config.json", "base.json"}


@pytest.mark.slow
def test_a_policy_whose_first_weights_were_the_best_says_that_it_is_its_base(
    lora_pipeline: Any,
) -> None:
    job = lora_pipeline.job("policy", iterations=1, learning_rate=1e-12)
    model = lora_pipeline.folder("model")
    started = {role: each for role, each in job.inputs.items() if role not in ("init.base", "reference.base")}
    job = job.model_copy(update={"inputs": started | {"init": model, "reference": model}})
    result = run_stage(job)
    assert result.metrics["best_iteration"] == 0, "the same responses score the same, and the first is kept"
    assert result.same_as_base and not lora_pipeline.result("policy").same_as_base


def share_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(self: Training) -> PassLimits:
        return PassLimits(self.microbatch_size, self.microbatch_tokens, share_prompts=False)

    monkeypatch.setattr(Training, "pass_limits", property(limits))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "policy"])
def test_checkpointed_layers_change_no_byte(
    name: str, lora_pipeline: Any, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages read the prompt again for every response, as checkpointed layers require."""
    jobs = [lora_pipeline.job(name, gradient_checkpointing=each) for each in (False, True)]
    share_no_prompts(monkeypatch)
    assert run_stage(jobs[0]) == run_stage(jobs[1])
    assert contents(jobs[0].output) == contents(jobs[1].output)


@pytest.mark.slow
def test_checkpointed_layers_change_no_byte_of_all_weights(
    pipeline: Any, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reward", "value"):
        jobs = [pipeline.job(name, gradient_checkpointing=each) for each in (False, True)]
        with monkeypatch.context() as patched:
            share_no_prompts(patched)
            assert run_stage(jobs[0]) == run_stage(jobs[1])
        assert contents(jobs[0].output) == contents(jobs[1].output)


def job_on_ranks(name: str, pipeline: Any, folder: Path, **changes: Any) -> StageJob:
    """Return the job of a kind of stage; one that samples draws short responses."""
    job = of_kind(name, **changes)
    return (job if name in ("sft", "reward") else briefly(job))(pipeline, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rate"), [("sft", 1e-3), ("policy", 1e-4)])
def test_two_ranks_train_the_adapters_of_one(
    name: str, rate: float, lora_pipeline: Any, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    alone = job_on_ranks(name, lora_pipeline, tmp_path / "alone")
    run_to_compare(alone)
    job = job_on_ranks(name, lora_pipeline, tmp_path, microbatch_size=2)
    start(2, tmp_path / "jobs", [job], eps=ADAM_EPS)
    both, expected = (load_file(each.output / WEIGHTS) for each in (job, alone))
    assert_alike_weights(both, expected, learning_rate=rate)
    assert [result_of(job, rank).base for rank in (0, 1)] == [lora_pipeline.result(name).base] * 2


SHARDED: dict[str, dict[str, Any]] = {
    "sft": {"microbatch_size": 3},
    "reward": {"microbatch_size": 2},
    "value": {"microbatch_size": 2, "iterations": 2},
    "policy": {"microbatch_size": 2},
    "evaluation": {},
    "policy of all weights": {
        "microbatch_size": 2,
        "lora": False,
    },  # adapters are merged into each rank's own rows
    "sft of checkpointed layers": {"microbatch_size": 3, "gradient_checkpointing": True},
    "sft in bfloat16": {"microbatch_size": 3, "precision": "bfloat16"},
}


def sharded_job(name: str, pipeline: Any, folder: Path) -> StageJob:
    folder.mkdir(exist_ok=True)
    return job_on_ranks(name.partition(" ")[0], pipeline, folder, **SHARDED[name])


@pytest.fixture(scope="module")
def sharded(lora_pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StageJob]:
    """Return name → a stage that two ranks have done by FSDP2, with base and adapters spread over both."""
    folder = tmp_path_factory.mktemp("sharded")
    jobs = {
        name: sharded_job(name, lora_pipeline, folder / str(number)) for number, name in enumerate(SHARDED)
    }
    start(2, folder / "jobs", list(jobs.values()), strategy="fsdp2", eps=ADAM_EPS)
    return jobs


def adapters_of(job: StageJob) -> dict[str, torch.Tensor]:
    """Return the tensors of its artifact."""
    found: dict[str, torch.Tensor] = {}
    for file in job.output.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHARDED if "bfloat16" not in name])
def test_sharded_ranks_train_the_adapters_of_one_process(
    name: str, sharded: dict[str, StageJob], lora_pipeline: Any, tmp_path: Path
) -> None:
    alone, job = sharded_job(name, lora_pipeline, tmp_path), sharded[name]
    expected = run_to_compare(alone)
    assert {file.name for file in job.output.iterdir()} == {file.name for file in alone.output.iterdir()}
    if (rate := getattr(alone.work, "learning_rate", None)) is not None:
        assert_alike_weights(adapters_of(job), adapters_of(alone), learning_rate=rate)
    for rank in range(2):
        found = result_of(job, rank)
        assert_alike(found.metrics, expected.metrics, rel=2e-3, abs=2e-4)
        assert (found.base, found.same_as_base) == (expected.base, expected.same_as_base)


@pytest.mark.slow
def test_sharded_checkpoints_have_each_ranks_rows_of_the_adapters_alone(sharded: dict[str, StageJob]) -> None:
    kept = latest(sharded["policy"].scratch / CHECKPOINTS)
    assert kept is not None
    parts = [load_file(file) for file in sorted(kept.folder.glob("tensors-*.safetensors"))]
    assert len(parts) == 2
    for tensors in parts:
        weights = [key for key in tensors if ".weights/" in key]
        assert weights and all(".lora_" in key or "head." in key for key in weights)
    matrices = [key for key in parts[0] if ".weights/" in key and ".lora_B." in key]
    assert matrices and all(len(parts[0][key]) + len(parts[1][key]) >= 32 for key in matrices)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "strategy"), [(3, "fsdp2"), (2, "ddp")])
def test_a_sharded_checkpoint_of_adapters_is_read_by_other_ranks(
    world_size: int, strategy: str, sharded: dict[str, StageJob], lora_pipeline: Any, tmp_path: Path
) -> None:
    """The checkpoint is that of the last step, so nothing is trained, and the artifact has the bytes that two ranks wrote."""
    again = sharded_job("sft", lora_pipeline, tmp_path)
    shutil.rmtree(again.scratch)
    shutil.copytree(sharded["sft"].scratch, again.scratch)
    start(world_size, tmp_path / "jobs", [again], strategy=strategy, eps=ADAM_EPS)
    assert (again.output / WEIGHTS).read_bytes() == (sharded["sft"].output / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_each_rank_reads_its_own_rows_of_the_base(sharded: dict[str, StageJob], lora_pipeline: Any) -> None:
    job = sharded["sft"]
    weights = load_file(lora_pipeline.folder("model") / "model.safetensors")
    whole = sum(weight.numel() * weight.element_size() for weight in weights.values())
    read = [sum(json.loads((job.scratch / f"bytes-{rank}.json").read_text())) for rank in range(2)]
    assert sum(read) == whole and max(read) <= 0.51 * whole


@pytest.mark.slow
def test_adapters_of_sharded_ranks_in_bfloat16_are_those_of_one_process_within_its_rounding(
    sharded: dict[str, StageJob], lora_pipeline: Any, tmp_path: Path
) -> None:
    """Each is about as far from the adapters in float32. The frozen base is held in bfloat16, and the adapters in float32."""
    name = "sft in bfloat16"
    alone = sharded_job(name, lora_pipeline, tmp_path)
    run_to_compare(alone)
    exact, near, found = (adapters_of(job) for job in (sharded["sft"], alone, sharded[name]))
    assert found.keys() == near.keys()
    distances = [
        torch.cat([(each[key] - exact[key]).flatten() for key in exact]).norm() for each in (near, found)
    ]
    assert 0 < distances[1] < 1.5 * distances[0]
