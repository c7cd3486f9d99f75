"""Test vLLM in the stage's process on a real GPU: ``make test-gpu``, where vllm is installed.

The file's name keeps it out of ``make test``. Models have random weights. Where Prefect is missing, add ``--confcutdir tests/gpu``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tasks.conftest import Pipeline
from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import MAX_GAP, WeightsDiffer
from vantage.tasks.rollout.running_vllm import RunningVllm
from vantage.tasks.rollout.vllm_engine import VllmEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.training.optimization import Precision

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[1, 20, 21, 22], [1, 30, 31], [1, *range(40, 60)]]
DEVICE = torch.device("cuda")
CACHE = 8 * 2**30
"""Bytes that vLLM's cache takes at least: 30 % of a GPU is more."""


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def precision(request: pytest.FixtureRequest) -> Precision:
    found: Precision = request.param
    return found


@pytest.fixture(scope="module")
def parts(
    precision: Precision, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PolicyModel, Codec, VllmEngine]]:
    """Yield a policy on the GPU, its codec, and one vLLM that all tests of a precision share."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()
    policy = PolicyModel(nn.Module.to(model, DEVICE))  # transformers' own ``to`` has no types
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    settings = Generation(max_prompt_tokens=32, max_response_tokens=24, temperature=0.7)
    codec = Codec(load_tokenizer(folder), settings, None)
    engine = load_engine(
        policy, codec, limits=PassLimits(), precision=precision, rollout=Sampling(engine="vllm")
    )
    assert isinstance(engine, VllmEngine)
    yield policy, codec, engine
    engine.close()


def moved(policy: PolicyModel, by: float) -> None:
    """Change every weight by about so much."""
    drawn = torch.Generator(DEVICE).manual_seed(3)
    with torch.no_grad():
        for weight in policy.causal_lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=drawn, device=DEVICE), alpha=by)


def gaps(policy: PolicyModel, prompts: list[list[int]], found: Any) -> torch.Tensor:
    """Return |Δ| between the engine's log-probabilities at temperature 0.7 and those of passes in float64."""
    exact = nn.Module.to(LlamaForCausalLM(policy.causal_lm.config), DEVICE, torch.float64)
    exact.load_state_dict({name: each.double() for name, each in policy.causal_lm.state_dict().items()})
    all_gaps = []
    with torch.no_grad():
        for prompt, ids, logprobs in zip(prompts, found.responses, found.logprobs, strict=True):
            row = torch.tensor([prompt + ids], device=DEVICE)
            logits = exact(row).logits[0, len(prompt) - 1 : -1] / 0.7
            own = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids, device=DEVICE)[:, None])[:, 0]
            all_gaps.append((own.cpu() - torch.tensor(logprobs)).abs())
    return torch.cat(all_gaps)


def test_every_update_reaches_the_engine_and_it_sleeps_between(
    parts: tuple[PolicyModel, Codec, VllmEngine], precision: Precision
) -> None:
    """vLLM computes in the stage's precision. Its memory is free while it sleeps."""
    policy, codec, engine = parts
    prompts = [prompt for prompt in PROMPTS for _ in range(8)]
    for update in (0.02, 0.01, 1e-4):
        found = engine.generate(PROMPTS, count=8, seed=3)
        free_asleep, _ = torch.cuda.mem_get_info()
        assert len(found.responses) == 24
        gap = gaps(policy, prompts, found)
        print(f"{precision}: gap mean {gap.mean():.2g}, worst {gap.max():.2g}")
        assert gap.mean() < MAX_GAP[precision]
        for ids, ended in zip(found.responses, found.ended, strict=True):
            assert ended == (ids[-1] in codec.stop_token_ids)
            assert ended or len(ids) == 24
        moved(policy, update)
        engine.take_weights(policy.causal_lm.named_parameters())
        free_awake, _ = torch.cuda.mem_get_info()
        print(f"free asleep {free_asleep / 2**30:.1f} GiB, awake {free_awake / 2**30:.1f} GiB")
        assert free_asleep - free_awake > CACHE
        assert engine._proof is not None
        print("proof", engine._proof.gap)


def test_the_same_seed_gives_the_same_responses_after_sleeping(
    parts: tuple[PolicyModel, Codec, VllmEngine],
) -> None:
    _, _, engine = parts
    first = engine.generate(PROMPTS, count=4, seed=3)
    assert engine._vllm is not None and engine._vllm._is_asleep
    assert engine.generate(PROMPTS, count=4, seed=3).responses == first.responses
    assert engine.generate(PROMPTS, count=4, seed=4).responses != first.responses


def test_weights_pushed_by_hand_are_found(parts: tuple[PolicyModel, Codec, VllmEngine]) -> None:
    policy, _, engine = parts
    engine.generate(PROMPTS, count=1, seed=1)
    assert engine._vllm is not None
    other = {name: weight + 0.05 * weight.std() for name, weight in policy.causal_lm.named_parameters()}
    engine._vllm.push({name: weight.flip(0) for name, weight in other.items()})
    with pytest.raises(WeightsDiffer, match="nothing was sampled"):
        engine.generate(PROMPTS, count=1, seed=1)
    engine.take_weights(policy.causal_lm.named_parameters())


def test_an_engine_that_breaks_is_started_again(
    parts: tuple[PolicyModel, Codec, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = parts
    expected = engine.generate(PROMPTS, count=4, seed=3)
    broken: RunningVllm | None = engine._vllm
    assert broken is not None
    step, steps = broken._llm.llm_engine.step, []

    def breaking() -> Any:
        steps.append(1)
        if len(steps) == 12:
            raise RuntimeError("broken")
        return step()

    monkeypatch.setattr(broken._llm.llm_engine, "step", breaking)
    assert engine.generate(PROMPTS, count=4, seed=3).responses == expected.responses
    assert broken.is_closed and engine._vllm is not broken


@pytest.mark.parametrize("kind", ["policy", "evaluation"])
def test_whole_stages_sample_with_vllm(kind: str, precision: Precision, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "pipeline", width=128)
    job = pipeline.job(kind)
    before: Any = job.work
    rollout = before.rollout.model_copy(update={"engine": "vllm"})
    work = before.model_copy(update={"rollout": rollout, "precision": precision})
    assert run_stage(job.model_copy(update={"work": work})).metrics
