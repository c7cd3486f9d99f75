"""vLLM in the stage's process gets the base once, then adapters alone, and a proof shows that they act there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import fake_vllm
from tests.support.fake_vllm import Faults
from tests.support.slow import slow
from tests.tasks.rollout.test_engine import best_of_n_job
from tests.tasks.rollout.test_remote_engine import assert_alike, by_hand
from tests.tasks.rollout.test_vllm_engine import engine_of
from vantage.ledger.journal import read
from vantage.models.adapters import Adaptation, add_adapters
from vantage.models.folders import load_policy
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Codec, codec_of, read_prompts
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

RANK = 4


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return fake_vllm.install(monkeypatch)


def adapted_parts(
    pipeline: Any, *, lora: Lora | None = None, **generation: Any
) -> tuple[PolicyModel, Codec, list[list[int]]]:
    """Return a policy with fresh adapters, which change nothing yet, its codec, and prompts."""
    job: StageJob = pipeline.job("policy")
    job = job.model_copy(update={"generation": job.generation.model_copy(update=generation)})
    codec = codec_of(job, "init")
    model = load_policy(pipeline.folder("model"))
    add_adapters(model, Adaptation(lora or Lora(rank=RANK, alpha=8.0), seed=3))
    return PolicyModel(model), codec, list(read_prompts(job.inputs["prompts"], "train", codec).ids[:4])


def moved_adapters(policy: PolicyModel, by: float, *, seed: int = 3) -> None:
    """Change every matrix B by about so much."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.causal_lm.named_parameters():
            if ".lora_B." in name:
                weight.add_(torch.randn(weight.shape, generator=drawn), alpha=by)


def adapter_bytes(policy: PolicyModel) -> int:
    """Return the bytes of the matrices A and B in float32, 4·rank·(inputs + outputs) for each frozen weight."""
    shapes = [
        weight.shape
        for name, weight in policy.causal_lm.named_parameters()
        if name.endswith(".base_layer.weight")
    ]
    return sum(4 * RANK * (outputs + inputs) for outputs, inputs in shapes)


def test_the_base_is_sent_once_and_each_update_sends_the_adapter_alone(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = adapted_parts(pipeline, temperature=0.7)
    engine = engine_of(policy, codec)
    digests = set()
    for update in range(3):
        found = engine.generate(prompts, count=2, seed=1)
        assert_alike(found, by_hand(policy, codec, prompts, count=2, seed=1))
        assert engine._proof is not None and engine._proof.gap < 1e-5
        digests.add(engine._proof.digest)
        moved_adapters(policy, 0.2, seed=update)
        engine.take_weights(policy.causal_lm.named_parameters())
    assert len(digests) == 3
    base = load_policy(pipeline.folder("model"))
    whole, *updates = faults.sent
    assert whole == sum(weight.nbytes for weight in base.parameters())
    size = adapter_bytes(policy)
    assert len(updates) == 4 and all(size < each < size + 8192 for each in updates), "names and shapes beside"
    assert faults.updates == faults.starts == 1 and faults.adapters == [1, 2, 3, 4]
    assert [each.prefix_resets for each in faults.engines] == [5], "after the base, and after each adapter"
    assert [each.llm_engine.loaded.keys() for each in faults.engines] == [{4}], "old ones are removed"


def test_adapters_of_some_layers_and_stop_strings_and_greedy_responses(pipeline: Any, faults: Faults) -> None:
    lora = Lora(rank=9, alpha=3.0, targets=("q_proj", "down_proj"))
    policy, codec, prompts = adapted_parts(pipeline, lora=lora, temperature=0.7)
    moved_adapters(policy, 0.3)
    found = engine_of(policy, codec).generate(prompts, count=2, seed=1, greedy=True)
    assert_alike(found, by_hand(policy, codec, prompts, count=2, seed=1, greedy=True))
    assert faults.engines[0].settings["max_lora_rank"] == 16
    assert faults.engines[0].settings["lora_target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    "by, fault, message",
    [
        (0.2, {"loses_adapters": True}, "answers without the policy's adapters"),
        (1e-5, {"loses_adapters": True}, r"effect there is (-?0\.0\d) times"),
        (0.2, {"scaling": 0.5}, "does not hold the policy's weights"),
        (1e-5, {"scaling": 0.5}, r"effect there is 0\.(49|50|51) times"),
        (1e-5, {"scaling": 2.0}, r"effect there is (1\.99|2\.0[01]) times"),
        (1e-5, {"scaling": RANK**0.5}, "another scaling"),
    ],
)
def test_adapters_that_do_not_arrive_or_are_scaled_otherwise_are_found(
    by: float, fault: dict[str, Any], message: str, pipeline: Any, faults: Faults
) -> None:
    """They are found also far below the bound that rounding needs, and in an attempt that goes on with a checkpoint's
    adapters.
    """
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, by)
    for name, value in fault.items():
        setattr(faults, name, value)
    with pytest.raises(WeightsDiffer, match=message):
        engine_of(policy, codec).generate(prompts, count=1, seed=1)
    assert not faults.asked, "nothing was sampled"


@pytest.mark.parametrize(
    "by, message",
    [
        (0.2, "does not hold the policy's weights"),
        (1e-5, "before the last update"),
    ],
)
def test_an_old_adapter_is_found(by: float, message: str, pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, 0.2)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=1, seed=1)
    faults.keeps_old_adapter = True
    moved_adapters(policy, by, seed=4)
    with pytest.raises(WeightsDiffer, match=message):
        engine.take_weights(policy.causal_lm.named_parameters())


def test_a_base_that_another_gave_is_found(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, 0.2)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=1, seed=1)
    with torch.no_grad():
        for model in faults.engines[0].llm_engine.loaded.values():
            model.get_output_embeddings().weight.mul_(1.01)
    with pytest.raises(WeightsDiffer, match="does not hold the policy's weights"):
        engine.generate(prompts, count=1, seed=2)


def test_an_engine_that_breaks_in_an_update_gets_base_and_adapter_again(
    pipeline: Any, faults: Faults
) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=2, seed=1)
    faults.failing_adapters = {2}
    moved_adapters(policy, 0.2)
    engine.take_weights(policy.causal_lm.named_parameters())
    faults.raising_steps = {faults.steps + 9}
    found = engine.generate(prompts, count=2, seed=1)
    assert_alike(found, by_hand(policy, codec, prompts, count=2, seed=1))
    assert faults.starts == faults.updates == 3
    assert faults.adapters == [1, 2, 1, 1]


def test_the_proof_leaves_the_policy_and_what_it_trains_as_they_were(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, 0.2)
    weights = {name: weight.clone() for name, weight in policy.causal_lm.named_parameters()}
    trained = {name for name, weight in policy.causal_lm.named_parameters() if weight.requires_grad}
    engine_of(policy, codec).generate(prompts, count=1, seed=1)
    for name, weight in policy.causal_lm.named_parameters():
        assert torch.equal(weight, weights[name]) and weight.requires_grad == (name in trained)
    with torch.no_grad():
        ids = torch.tensor(prompts[:1])
        base = load_policy(pipeline.folder("model"))(ids).logits
        assert (policy.causal_lm(ids).logits - base).abs().max() > 0.01, "the adapters are applied again"


def test_what_vllm_cannot_apply_is_refused_by_name(pipeline: Any, faults: Faults) -> None:
    policy, codec, _ = adapted_parts(pipeline, lora=Lora(rank=513, alpha=8.0, targets=("q_proj",)))
    with pytest.raises(ValueError, match=r"rank 512 at most, and lora\.rank=513; use a smaller rank"):
        engine_of(policy, codec)
    policy, codec, _ = adapted_parts(pipeline)
    policy.causal_lm.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is trained beside them; use plain LoRA"):
        engine_of(policy, codec)
    policy, codec, _ = adapted_parts(pipeline)
    layer = next(module for module in policy.causal_lm.modules() if hasattr(module, "lora_A"))
    layer.lora_magnitude_vector = nn.ParameterDict({"default": nn.Parameter(torch.ones(4))})  # DoRA's
    with pytest.raises(ValueError, match=r"lora_magnitude_vector\.default is trained beside them"):
        engine_of(policy, codec)
    policy, codec, _ = adapted_parts(pipeline)
    packed = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    policy.causal_lm.model.layers[0].mlp.up_proj.base_layer.weight = packed
    with pytest.raises(ValueError, match=r"up_proj\.base_layer\.weight is held in 4 bits; use engine: loop"):
        engine_of(policy, codec)


@pytest.mark.parametrize("kind", ["policy", *slow("best_of_n", "collected", "evaluation", "value")])
def test_whole_stages_sample_from_adapters(
    kind: str, lora_pipeline: Any, few_prompts: Path, faults: Faults, tmp_path: Path
) -> None:
    """Each stage reads the adapters of an earlier one, and its trainer compares its log-probabilities with the engine's."""
    job = lora_pipeline.job("policy" if kind == "best_of_n" else kind, folder=tmp_path)
    if kind == "best_of_n":
        plain = best_of_n_job(lora_pipeline, tmp_path)
        work = plain.work.model_copy(update={"lora": job.work.lora})
        bases = {
            name: folder for name, folder in job.inputs.items() if name.removesuffix(".base") in plain.inputs
        }
        job = plain.model_copy(update={"work": work, "inputs": bases})
    rollout = job.work.rollout.model_copy(update={"engine": "vllm"})
    work = job.work.model_copy(update={"rollout": rollout})
    run_stage(job.model_copy(update={"work": work, "inputs": job.inputs | {"prompts": few_prompts}}))
    assert faults.asked and faults.adapters
    if kind == "policy":
        assert faults.starts == faults.updates == 1 and len(faults.adapters) > job.work.iterations
        curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
        assert len({each["sampled_weights"] for each in curves}) == job.work.iterations == len(curves)
        assert max(each["sampler_gap"] for each in curves) < 1e-4


def test_an_update_of_adapters_wakes_the_engine(pipeline: Any, faults: Faults) -> None:
    """The base, which is not sent again, is still there after the engine has slept."""
    policy, codec, prompts = adapted_parts(pipeline)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=2, seed=1)
    assert engine._vllm is not None
    engine._vllm._can_sleep = True
    engine.generate(prompts, count=2, seed=1)
    assert faults.engines[0].llm_engine.is_asleep
    moved_adapters(policy, 0.2)
    engine.take_weights(policy.causal_lm.named_parameters())
    assert not faults.engines[0].llm_engine.is_asleep
    after = engine.generate(prompts, count=2, seed=1)
    assert after == engine_of(policy, codec).generate(prompts, count=2, seed=1)
    assert faults.starts == 2
