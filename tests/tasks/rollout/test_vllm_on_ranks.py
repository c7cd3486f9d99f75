"""Each of several ranks has vLLM in its process: shares of responses, whole weights from parts, one process group, and failures."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import fake_vllm
from tests.support.on_ranks import on_ranks
from tests.tasks.alike import ADAM_EPS, assert_alike, assert_alike_weights, run_to_compare
from tests.tasks.small_model import write_small_model
from tests.tasks.test_stages_on_ranks import moved, result_of
from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.running_vllm import VllmFailed
from vantage.tasks.rollout.vllm_engine import VllmEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.training import optimization, ranks
from vantage.tasks.training.networks import placed

PROMPTS = [[1, 20, 21], [1, 30], [1, 40, 41, 42], [1, 50], [1, 60, 61]]
VLLM = Sampling(engine="vllm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, seed in (("model", 1), ("other", 2)):
        write_small_model(tmp_path / name, width=64, seed=seed)
        write_tokenizer(tmp_path / name)
    return tmp_path


def engine_of(folder: Path) -> tuple[PolicyModel, VllmEngine]:
    files = ModelFiles(folder)
    policy = placed(
        lambda: PolicyModel(load_stored_policy(files)), files.folder, torch.device("cpu"), precision="float32"
    )
    settings = Generation(max_prompt_tokens=8, max_response_tokens=12, temperature=0.7)
    codec = Codec(load_tokenizer(folder), settings, None)
    engine = load_engine(policy, codec, limits=PassLimits(), rollout=VLLM)
    assert isinstance(engine, VllmEngine)
    return policy, engine


def table(samples: Samples, name: str) -> dict[str, Tensor]:
    """Return responses as tensors, filled up with -1."""
    rows = [torch.tensor(each) for each in samples.responses]
    logprobs = [torch.tensor(each, dtype=torch.float64) for each in samples.logprobs]
    return {
        f"{name}/ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1),
        f"{name}/logprobs": torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True),
        f"{name}/ended": torch.tensor(samples.ended),
    }


def sampled(folder: Path) -> dict[str, Any]:
    """Return what ranks sample: an odd number of responses, fewer than ranks, after an update, and by another policy,
    for which the first vLLM ends.
    """
    sys.modules |= fake_vllm.modules()
    policy, engine = engine_of(folder / "model")
    found = table(engine.generate(PROMPTS, count=3, seed=5), "first")
    found |= table(engine.generate(PROMPTS[:1], count=1, seed=6, greedy=True), "greedy")
    with torch.no_grad():
        for weight in policy.causal_lm.parameters():
            weight.mul_(1.5)
    engine.take_weights(policy.causal_lm.named_parameters())
    found |= table(engine.generate(PROMPTS, count=1, seed=7), "updated")
    _, other = engine_of(folder / "other")
    found |= table(other.generate(PROMPTS, count=1, seed=7), "other")
    other.close()
    faults = fake_vllm.FAULTS
    return {
        **found,
        "seeds": torch.tensor(sorted(faults.asked)),
        "starts": faults.starts,
        "sum": ranks.total(torch.tensor(1)),
        "sent": faults.sent[0],
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_each_rank_samples_its_share_from_whole_weights(
    strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' responses are those of one process, and their own process group outlives a vLLM that ends it."""
    fake_vllm.install(monkeypatch)
    alone = sampled(folder)
    both = on_ranks(sampled, folder, strategy=strategy)
    for each in both:
        assert each["sum"] == 2 and each["starts"] == alone["starts"] == 2
        assert each["sent"] == alone["sent"], "the bytes of whole weights"
        for name in (name for name in alone if "/" in name):
            torch.testing.assert_close(each[name], alone[name], atol=1e-5, rtol=0)
    seeds = torch.cat([each["seeds"] for each in both])
    assert torch.equal(seeds.sort().values, alone["seeds"]), "each response is sampled once"
    assert [len(each["seeds"]) for each in both] == [8 + 1 + 3 + 3, 7 + 0 + 2 + 2]


def broken(folder: Path) -> dict[str, Any]:
    """Break the second rank's vLLM in three ways, and return what it said, as bytes."""
    said: dict[str, Any] = {}
    for name in ("step", "response", "update"):
        sys.modules |= fake_vllm.modules()
        faults = fake_vllm.FAULTS
        policy, engine = engine_of(folder / "model")
        engine.generate(PROMPTS, count=1, seed=5)
        faults.raising_steps = {faults.steps + 2} if name == "step" else set()
        faults.dropped = {len(faults.asked)} if name == "response" else set()
        faults.failing_updates = {2} if name == "update" else set()
        if ranks.rank() == 1:  # the first rank would wait for its responses
            with pytest.raises(VllmFailed) as caught:
                if name == "update":
                    engine.take_weights(policy.causal_lm.named_parameters())
                else:
                    engine.generate(PROMPTS, count=1, seed=6)
            said[name] = torch.tensor(list(str(caught.value).encode()))
        assert faults.starts == 1
        ranks.wait()
        engine.close()
    return said


def test_one_that_breaks_ends_its_rank(folder: Path) -> None:
    """A vLLM does not start again without the others, which would wait for it."""
    first, second = on_ranks(broken, folder)
    assert not first
    for name, reason in (
        ("step", "vLLM raised an error while it sampled: step"),
        ("response", "vLLM returned 1 of 2 responses"),
        ("update", "vLLM could not take the weights: update 2 is broken"),
    ):
        message = bytes(second[name].tolist()).decode()
        assert message.startswith(f"rank 1 of 2: {reason}"), message
        assert message.endswith("the ranks' vLLMs start only together")


def job_of(folder: Path) -> StageJob:
    return StageJob.model_validate_json((folder / "job.json").read_bytes())


def trained(folder: Path) -> dict[str, Any]:
    """Run the stage on this rank."""
    sys.modules |= fake_vllm.modules()
    vars(optimization)["EPS"] = ADAM_EPS
    job = job_of(folder)
    result = run_stage(job)
    (job.scratch / f"result-{ranks.rank()}.json").write_text(result.model_dump_json())
    return {"asked": len(fake_vllm.FAULTS.asked), "updates": fake_vllm.FAULTS.updates}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_stage_of_two_ranks_is_that_of_one_process(
    strategy: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {}
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
        job = pipeline.job("policy", folder=tmp_path / name, iterations=3)
        rollout = job.work.rollout.model_copy(update={"engine": "vllm"})
        jobs[name] = job.model_copy(
            update={"work": resolve_work(job.work.model_copy(update={"rollout": rollout}))}
        )
    (tmp_path / "job.json").write_text(jobs["together"].model_dump_json())
    faults = fake_vllm.install(monkeypatch)
    expected = run_to_compare(jobs["alone"])
    counts = on_ranks(trained, tmp_path, strategy=strategy)
    assert sum(each["asked"] for each in counts) == len(faults.asked)
    assert {each["updates"] for each in counts} == {faults.updates}
    rate = jobs["alone"].work.learning_rate
    assert_alike_weights(moved(jobs["together"]), moved(jobs["alone"]), learning_rate=rate)
    results = [result_of(jobs["together"], rank) for rank in range(2)]
    assert results[0].metrics == results[1].metrics
    assert_alike(results[0].metrics, expected.metrics, rel=2e-3, abs=2e-4)
