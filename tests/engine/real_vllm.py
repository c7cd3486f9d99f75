"""Test the real vLLM on a CPU: ``make test-engine``. The file's name keeps it out of ``make test``, whose environment has no vLLM.

Models have random weights and heads of 32 numbers, the smallest that vLLM computes on a CPU.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.support.on_ranks import on_ranks
from tests.tasks.conftest import Pipeline
from vantage.ledger.journal import read
from vantage.models.adapters import Adaptation, add_adapters
from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.running_vllm import RunningVllm
from vantage.tasks.rollout.vllm_engine import VllmEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.training import ranks
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.scratch import JOURNAL

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
    folder: Path, *, precision: Precision = "float32", lora: Lora | None = None, **generation: Any
) -> tuple[PolicyModel, Codec, VllmEngine]:
    """Return a policy, its codec, and vLLM for it."""
    settings = Generation(max_prompt_tokens=32, max_response_tokens=24, **generation)
    policy, codec = PolicyModel(load_policy(folder)), Codec(load_tokenizer(folder), settings, None)
    if lora is not None:
        add_adapters(policy.causal_lm, Adaptation(lora, seed=5))
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


def moved_adapters(policy: PolicyModel, by: float, *, seed: int = 3) -> None:
    """Change every matrix B by about so much."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.causal_lm.named_parameters():
            if ".lora_B." in name:
                weight.add_(torch.randn(weight.shape, generator=drawn), alpha=by)


def worst_gap(policy: PolicyModel, temperature: float, prompts: list[list[int]], found: Any) -> float:
    """Return the largest |Δ| of the engine's log-probabilities to those of one pass in float64."""
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
    """Output heads share the embedding's weights or have their own, and some layers have biases. The last of three
    updates is small."""
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


def on_a_rank(folder: Path) -> dict[str, Any]:
    """Sample before and after an update, then from another policy, for which the first vLLM ends."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    worst = []
    for name in ("tied", "untied"):
        policy, _, engine = engine_at(folder / name, temperature=0.7)
        for update in (0.05, 0.0):
            found = engine.generate(PROMPTS, count=3, seed=3)
            prompts = [prompt for prompt in PROMPTS for _ in range(3)]
            worst.append(worst_gap(policy, 0.7, prompts, found))
            moved(policy, update)
            engine.take_weights(policy.causal_lm.named_parameters())
    engine.close()
    distinct = len({*map(tuple, found.responses)})
    return {"worst": max(worst), "distinct": distinct, "ranks": ranks.total(torch.tensor(1)).item()}


def test_each_of_two_ranks_has_a_vllm(tmp_path: Path) -> None:
    """Nine responses are sampled by two ranks, in a process group that outlives the first vLLM."""
    for name in ("tied", "untied"):
        model(tmp_path / name, name)
    for each in on_ranks(on_a_rank, tmp_path):
        assert each["worst"] < 1e-4 and each["distinct"] == 9 and each["ranks"] == 2


def test_prompts_of_more_tokens_than_a_step_reads_are_sampled_from(tmp_path: Path) -> None:
    """A step reads 4,096 tokens of prompts, and vLLM on a CPU cannot read one in two parts where responses have seeds."""
    _, _, engine = engine_at(model(tmp_path / "model", "tied"))
    prompts = [[1, *range(40 + row % 8, 68 + row % 8), 3 + row % 30] for row in range(150)]
    assert sum(map(len, prompts)) > 4096
    assert len(engine.generate(prompts, count=1, seed=3).responses) == 150
    engine.close()


def test_the_same_seed_gives_the_same_responses_alone_and_beside_others(tmp_path: Path) -> None:
    """The same seed gives equal responses on one machine, in float32 and with few rows, where rounding permits it."""
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
    """Of 2,000 first tokens, every frequency is within five standard errors of its probability."""
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
        patch.setattr(RunningVllm, "push", lambda self, weights, hashed: None)
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


def names_as_given(network: torch.nn.Module) -> set[str]:
    """Return the parameters of vLLM's model that it holds as they were given: a packed matrix leaves an empty one, and its bias in float32."""
    return {
        name
        for name, weight in network.named_parameters()
        if weight.numel() and weight.dtype == torch.bfloat16
    }


@pytest.mark.parametrize("packs", [False, True], ids=["as-given", "as-this-CPU-packs"])
def test_a_small_update_that_bfloat16_hides_is_found_by_checksums(
    packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters that vLLM holds as they were given agree, joined ones and biases too; an update that does not arrive is below the bound of log-probabilities."""
    if not packs:  # what a CPU packs differs from one to the next: a GPU packs none
        monkeypatch.setattr("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *shape: False)
        monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    policy, _, engine = engine_at(model(tmp_path / "model", "qwen"), precision="bfloat16")
    engine.generate(PROMPTS, count=1, seed=1)
    assert engine._vllm is not None
    held, known = engine._vllm.checksums(), engine._checksums._known[""]
    as_given = engine._vllm._llm.apply_model(names_as_given)[0]
    assert held is not None and known == as_given and "lm_head.weight" in known
    if not packs:
        assert known == held.keys() and "model.layers.1.self_attn.qkv_proj.bias" in known
    some = sorted(known)[::2]
    assert engine._vllm.checksums(some) == {name: held[name] for name in some}

    def hash_alone(self: RunningVllm, weights: Any, hashed: Any) -> None:
        for name, weight in weights.items():
            hashed.add(name, weight)

    with monkeypatch.context() as patch:
        patch.setattr(RunningVllm, "push", hash_alone)
        moved(policy, 1e-4)
        with pytest.raises(
            WeightsDiffer, match=rf"the sha256 of \d+ of the {len(known)} that agreed before differ"
        ):
            engine.take_weights(policy.causal_lm.named_parameters())
    engine.take_weights(policy.causal_lm.named_parameters())
    engine.close()


@pytest.mark.parametrize(
    "name, lora",
    [
        ("tied", Lora(rank=4, alpha=8.0)),
        ("untied", Lora(rank=9, alpha=3.0, targets=("q_proj", "v_proj"))),
        ("qwen", Lora(rank=1, alpha=2.0, targets=("up_proj", "down_proj", "o_proj"))),
    ],
)
def test_every_update_of_adapters_reaches_the_real_engine(name: str, lora: Lora, tmp_path: Path) -> None:
    """vLLM fuses layers, of which all or a part have adapters. They are updated three times, the last time by little,
    and the base is given once.
    """
    policy, _, engine = engine_at(model(tmp_path / "model", name), lora=lora, temperature=0.7)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    for number, update in enumerate((0.1, 0.05, 1e-4), start=1):
        found = engine.generate(PROMPTS, count=4, seed=3)
        assert worst_gap(policy, 0.7, prompts, found) < 1e-4
        moved_adapters(policy, update, seed=number)
        began, vllm = time.monotonic(), engine._vllm
        engine.take_weights(policy.causal_lm.named_parameters())
        assert engine._vllm is vllm is not None and engine._proof is not None and engine._proof.gap < 2e-5
        assert vllm._llm.llm_engine.list_loras() == {number + 1}
        print(f"adapter and proof in {time.monotonic() - began:.2f} s, gap {engine._proof.gap:.2g}")
    engine.close()


def test_adapters_that_do_not_arrive_or_are_old_or_scaled_otherwise_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _, engine = engine_at(model(tmp_path / "model", "tied"), lora=Lora(rank=4, alpha=8.0))
    moved_adapters(policy, 5e-6)
    engine.generate(PROMPTS, count=1, seed=1)
    vllm = engine._vllm
    assert vllm is not None
    with monkeypatch.context() as patch:
        patch.setattr(RunningVllm, "push_adapter", lambda self, folder: None)
        moved_adapters(policy, 4e-6, seed=4)
        with pytest.raises(WeightsDiffer, match="before the last update"):
            engine.take_weights(policy.causal_lm.named_parameters())
        patch.setattr(vllm, "_adapter", None)
        with pytest.raises(WeightsDiffer, match=r"effect there is -?0\.0\d times"):
            engine.generate(PROMPTS, count=1, seed=1)
    layers: list[Any] = [each for each in policy.causal_lm.modules() if hasattr(each, "lora_A")]
    for layer in layers:
        layer.scaling["default"] = 8.0 / 4**0.5  # rsLoRA's, which the adapter's file does not name
    engine._sampled._before = engine._sampled._now = None  # as it happens after a resume
    with pytest.raises(WeightsDiffer, match=r"effect there is 0\.(49|50|51) times"):
        engine.take_weights(policy.causal_lm.named_parameters())
    for layer in layers:
        layer.scaling["default"] = 2.0
    engine.take_weights(policy.causal_lm.named_parameters())
    engine.generate(PROMPTS, count=1, seed=1)
    engine.close()


def test_adapters_in_bfloat16_hold_within_its_bound(tmp_path: Path) -> None:
    folder, lora = model(tmp_path / "model", "tied"), Lora(rank=4, alpha=8.0)
    policy, _, engine = engine_at(folder, precision="bfloat16", lora=lora)
    for update in (0.05, 0.1, 0.02):
        engine.generate(PROMPTS, count=1, seed=1)
        moved_adapters(policy, update)
        engine.take_weights(policy.causal_lm.named_parameters())
        assert engine._proof is not None
        print("bfloat16 gap with adapters", engine._proof.gap)
    engine.close()


def test_a_whole_stage_samples_from_adapters_with_the_real_engine(tmp_path: Path) -> None:
    """The trainer compares its log-probabilities with the sampler's in each iteration."""
    pipeline = Pipeline(tmp_path / "pipeline", width=128, lora=Lora(rank=4, alpha=8.0))
    job = pipeline.job("policy")
    before: Any = job.work
    rollout = before.rollout.model_copy(update={"engine": "vllm"})
    assert run_stage(job.model_copy(update={"work": before.model_copy(update={"rollout": rollout})})).metrics
    curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert len({each["sampled_weights"] for each in curves}) == len(curves) == before.iterations
    assert max(each["sampler_gap"] for each in curves) < 1e-4


@pytest.mark.parametrize(
    "kind, precision", [("policy", "float32"), ("policy", "bfloat16"), ("evaluation", "bfloat16")]
)
def test_whole_stages_sample_with_the_real_engine(kind: str, precision: str, tmp_path: Path) -> None:
    """The stages are a policy optimisation, which compares log-probabilities with the sampler's in each iteration, and
    an evaluation."""
    pipeline = Pipeline(tmp_path / "pipeline", width=128)
    job = pipeline.job(kind)
    before: Any = job.work
    rollout = before.rollout.model_copy(update={"engine": "vllm"})
    work = before.model_copy(update={"rollout": rollout, "precision": precision})
    assert run_stage(job.model_copy(update={"work": work})).metrics
