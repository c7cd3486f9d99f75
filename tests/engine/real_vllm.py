"""The real vLLM on a CPU: ``make test-engine``. The file's name keeps it out of ``make test``, whose environment has no vLLM.

Models have random weights and heads of 32 numbers, the smallest that vLLM computes on a CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.tasks.conftest import Pipeline
from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.running_vllm import RunningVllm
from vantage.tasks.rollout.vllm_engine import VllmEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.training.optimization import Precision

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[1, 20, 21, 22], [1, 30, 31], [1, *range(40, 60)]]


def model(folder: Path, name: str, *, seed: int = 1) -> Path:
    """Write a model with its tokenizer."""
    torch.manual_seed(seed)
    network: PreTrainedModel
    if name == "qwen":
        network = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False))
        for weight in network.parameters():  # biases begin at 0
            weight.data.add_(torch.randn_like(weight), alpha=0.02)
    else:
        network = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=name == "tied"))
    network.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def engine_at(
    folder: Path, *, precision: Precision = "float32", **generation: Any
) -> tuple[PolicyModel, Codec, VllmEngine]:
    """A policy, its codec, and vLLM for it."""
    settings = Generation(max_prompt_tokens=32, max_response_tokens=24, **generation)
    policy, codec = PolicyModel(load_policy(folder)), Codec(load_tokenizer(folder), settings, None)
    engine = load_engine(
        policy, codec, limits=PassLimits(), precision=precision, rollout=Sampling(engine="vllm")
    )
    assert isinstance(engine, VllmEngine)
    return policy, codec, engine


def moved(policy: PolicyModel, by: float, *, seed: int = 3) -> None:
    """Change every weight by about so much."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.causal_lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=drawn), alpha=by)


def worst_gap(policy: PolicyModel, temperature: float, prompts: list[list[int]], found: Any) -> float:
    """The largest |Δ| of the engine's log-probabilities to those of one pass in float64."""
    exact = PolicyModel(policy.causal_lm).causal_lm.double()
    worst = 0.0
    with torch.no_grad():
        for prompt, ids, logprobs in zip(prompts, found.responses, found.logprobs, strict=True):
            logits = exact(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
            own = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            worst = max(worst, (own - torch.tensor(logprobs)).abs().max().item())
    exact.float()
    return worst


@pytest.mark.parametrize("name", ["tied", "untied", "qwen"])
def test_every_update_reaches_the_real_engine(name: str, tmp_path: Path) -> None:
    """Output heads that share the embedding's weights, or have their own; biases; three updates, the last one small."""
    policy, codec, engine = engine_at(model(tmp_path / "model", name), temperature=0.7)
    prompts = [prompt for prompt in PROMPTS for _ in range(8)]
    for update in (0.05, 0.02, 1e-4):
        found = engine.generate(PROMPTS, count=8, seed=3)
        assert len(found.responses) == 24 and len({*map(tuple, found.responses)}) == 24
        assert worst_gap(policy, 0.7, prompts, found) < 1e-4
        for ids, ended in zip(found.responses, found.ended, strict=True):
            assert ended == (ids[-1] in codec.stop_token_ids)
            assert ended or len(ids) == 24
            assert not set(ids[:-1]) & set(codec.stop_token_ids)
        moved(policy, update)
        engine.take_weights(policy.causal_lm.named_parameters())
        assert engine._proof is not None and engine._proof.gap < 2e-5
    engine.close()


def test_the_same_seed_gives_the_same_responses_alone_and_beside_others(tmp_path: Path) -> None:
    """Compare exactly where rounding permits: on one machine, in float32, with few rows."""
    _, _, engine = engine_at(model(tmp_path / "model", "tied"))
    first = engine.generate(PROMPTS, count=4, seed=3)
    assert engine.generate(PROMPTS, count=4, seed=3).responses == first.responses
    assert engine.generate(PROMPTS, count=4, seed=4).responses != first.responses
    engine.close()


def test_greedy_responses_and_stop_strings_are_those_of_the_loop(tmp_path: Path) -> None:
    policy, codec, engine = engine_at(model(tmp_path / "model", "tied"), temperature=0.7)
    loop = load_engine(policy, codec, limits=PassLimits())
    ours, theirs = (each.generate(PROMPTS, count=1, seed=1, greedy=True) for each in (loop, engine))
    assert theirs.responses == ours.responses and theirs.ended == ours.ended
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-4
    text = codec.whole_texts(ours.responses)[0][5]
    policy, codec, engine = engine_at(tmp_path / "model", temperature=0.7, stop=(text,))
    loop = load_engine(policy, codec, limits=PassLimits())
    ours, theirs = (each.generate(PROMPTS, count=1, seed=1, greedy=True) for each in (loop, engine))
    assert theirs.responses == ours.responses and theirs.ended == ours.ended
    assert len(ours.responses[0]) <= 6
    engine.close()


def test_sampled_frequencies_are_those_of_the_softmax(tmp_path: Path) -> None:
    """2,000 first tokens: every frequency within five standard errors of its probability."""
    policy, _, engine = engine_at(model(tmp_path / "model", "tied"), temperature=1.3)
    count = 2000
    found = engine.generate(PROMPTS[:1], count=count, seed=9)
    with torch.no_grad():
        exact = (policy.causal_lm(torch.tensor(PROMPTS[:1])).logits[0, -1].double() / 1.3).softmax(dim=-1)
    seen = torch.bincount(torch.tensor([ids[0] for ids in found.responses]), minlength=128) / count
    error = (exact * (1 - exact) / count).sqrt() + 1 / count
    assert ((seen - exact).abs() < 5 * error).all()
    engine.close()


def test_skipped_updates_and_weights_pushed_by_hand_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _, engine = engine_at(model(tmp_path / "model", "untied"))
    engine.generate(PROMPTS, count=1, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(RunningVllm, "push", lambda self, weights: None)
        moved(policy, 2e-7)
        with pytest.raises(WeightsDiffer, match="before the last update"):
            engine.take_weights(policy.causal_lm.named_parameters())
    engine.take_weights(policy.causal_lm.named_parameters())
    other = PolicyModel(load_policy(model(tmp_path / "other", "untied", seed=2)))
    assert engine._vllm is not None
    engine._vllm.push(dict(other.causal_lm.named_parameters()))
    with pytest.raises(WeightsDiffer, match="nothing was sampled"):
        engine.generate(PROMPTS, count=1, seed=1)
    engine.close()


def test_an_engine_that_breaks_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, engine = engine_at(model(tmp_path / "model", "tied"))
    expected = engine.generate(PROMPTS, count=4, seed=3)
    assert engine._vllm is not None
    broken, step, steps = engine._vllm, engine._vllm._llm.llm_engine.step, []

    def breaking() -> Any:
        steps.append(1)
        if len(steps) == 12:
            raise RuntimeError("broken")
        return step()

    monkeypatch.setattr(broken._llm.llm_engine, "step", breaking)
    assert engine.generate(PROMPTS, count=4, seed=3).responses == expected.responses
    assert broken.is_closed and engine._vllm is not broken
    engine.close()


def test_bfloat16_holds_within_its_bound(tmp_path: Path) -> None:
    policy, _, engine = engine_at(model(tmp_path / "model", "tied"), precision="bfloat16")
    engine.generate(PROMPTS, count=2, seed=1)
    moved(policy, 0.02)
    engine.take_weights(policy.causal_lm.named_parameters())
    assert engine._proof is not None
    print("bfloat16 gap", engine._proof.gap)
    engine.close()


@pytest.mark.parametrize(
    "kind, precision", [("policy", "float32"), ("policy", "bfloat16"), ("evaluation", "bfloat16")]
)
def test_whole_stages_sample_with_the_real_engine(kind: str, precision: str, tmp_path: Path) -> None:
    """Policy optimisation, whose trainer compares its log-probabilities with the sampler's in each iteration, and an evaluation."""
    pipeline = Pipeline(tmp_path / "pipeline", width=128)
    job = pipeline.job(kind)
    before: Any = job.work
    rollout = before.rollout.model_copy(update={"engine": "vllm"})
    work = before.model_copy(update={"rollout": rollout, "precision": precision})
    assert run_stage(job.model_copy(update={"work": work})).metrics
