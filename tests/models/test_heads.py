import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from vantage.models.folders import (
    UnsafeModel,
    check_folder,
    load_policy,
    save_policy,
)
from vantage.models.heads import (
    ScalarModel,
    freeze_attention,
    fresh_value_head,
    load_scalar,
    reward_with_language_head,
    save_reward,
    save_value,
    scores,
    value_from_policy,
    value_from_reward,
    values,
    values_and_final,
)
from vantage.models.sequences import Sequences, collate

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
ATTENTION = {
    "llama": (LlamaConfig(**SIZES), ".self_attn."),
    "qwen2": (Qwen2Config(**SIZES), ".self_attn."),
    "qwen3": (Qwen3Config(**SIZES), ".self_attn."),
    "gemma2": (Gemma2Config(**SIZES), ".self_attn."),
    "mistral": (MistralConfig(**SIZES), ".self_attn."),
    "phi": (PhiConfig(**{**SIZES, "num_key_value_heads": 2}), ".self_attn."),
    "gpt2": (GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2), ".attn."),
    "gpt_neox": (GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 2}), ".attention."),
    "bloom": (BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2), ".self_attention."),
}
"""Family → a tiny configuration, and what the names of its attention's weights contain."""

SHIFT = 0.375
PROMPTS = [[1, 20, 30], [1, 9], [1, 40, 41, 42, 43]]
# the second response ends with the padding id, which is also a token of the first
RESPONSES = [[50, 0, 51, 2], [60, 0], [70]]


@pytest.fixture
def sequences() -> Sequences:
    return collate(PROMPTS, RESPONSES, pad_token_id=0)


CPU = torch.device("cpu")


@pytest.fixture
def reward(tiny: Path) -> ScalarModel:
    return reward_with_language_head(tiny, seed=5, device=CPU)


@pytest.fixture
def reward_folder(reward: ScalarModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    save_reward(reward, tiny_tokenizer, tmp_path / "reward", score_shift=SHIFT)
    return tmp_path / "reward"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def long_sequences() -> Sequences:
    generator = torch.Generator().manual_seed(0)
    responses = torch.randint(100, (200, 12), generator=generator).tolist()
    return collate([[1]] * 200, responses, pad_token_id=0)


def scalar_after(model: ScalarModel, ids: list[int]) -> float:
    """Return the output of the head at the last of these tokens, without padding or masks."""
    with torch.no_grad():
        hidden = model.backbone(torch.tensor([ids])).last_hidden_state[0, -1]
        bias = 0.0 if model.head.bias is None else float(model.head.bias)
        return float(hidden @ model.head.weight[0]) + bias - model.score_shift


def test_a_score_is_read_at_the_last_token_of_the_response(reward: ScalarModel, sequences: Sequences) -> None:
    expected = [scalar_after(reward, p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    result = scores(reward, sequences)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_shift_is_subtracted_from_every_score(
    reward: ScalarModel, reward_folder: Path, sequences: Sequences
) -> None:
    torch.testing.assert_close(
        scores(load_scalar(reward_folder), sequences), scores(reward, sequences) - SHIFT
    )


def test_a_value_has_seen_the_tokens_before_it_and_no_more(tiny: Path, sequences: Sequences) -> None:
    model = value_from_policy(tiny, seed=5)
    with torch.no_grad():
        model.head.bias.fill_(0.5)
    result = values(model, sequences)
    assert result.dtype == torch.float32
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for t in range(4):
            expected = scalar_after(model, prompt + response[:t]) if t < len(response) else 0.0
            assert float(result[row, t].detach()) == pytest.approx(expected, abs=1e-5), (row, t)


def test_the_value_of_a_whole_response_has_seen_its_last_token(tiny: Path, sequences: Sequences) -> None:
    model = value_from_policy(tiny, seed=5)
    with torch.no_grad():
        model.head.bias.fill_(0.5)
    per_token, final = values_and_final(model, sequences)
    torch.testing.assert_close(per_token, values(model, sequences))
    expected = [
        scalar_after(model, prompt + response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert final.tolist() == pytest.approx(expected, abs=1e-5)
    assert final.dtype == torch.float32


def test_transformers_loads_a_reward_model_and_gives_the_same_raw_score(
    reward_folder: Path, reward: ScalarModel, sequences: Sequences
) -> None:
    classifier, report = AutoModelForSequenceClassification.from_pretrained(
        reward_folder, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert classifier.config.num_labels == 1
    ours = scores(reward, sequences)
    # row by row: transformers looks for the last id that is not padding, wherever the response ends
    for row in (0, 2):
        theirs = classifier(torch.tensor([PROMPTS[row] + RESPONSES[row]])).logits
        assert theirs.shape == (1, 1)
        torch.testing.assert_close(theirs[0, 0], ours[row], rtol=1e-5, atol=1e-5)


def test_a_value_model_made_of_a_reward_model_begins_with_its_score(
    reward_folder: Path, tiny_tokenizer: PreTrainedTokenizerBase, sequences: Sequences, tmp_path: Path
) -> None:
    value = value_from_reward(reward_folder)
    # one more token, so that there is a value that has seen the whole response
    longer = collate(PROMPTS, [[*response, 7] for response in RESPONSES], pad_token_id=0)
    at_the_end = values(value, longer).gather(1, sequences.lengths[:, None])[:, 0]
    expected = scores(load_scalar(reward_folder), sequences)
    torch.testing.assert_close(at_the_end, expected, rtol=1e-5, atol=1e-5)
    save_value(value, tiny_tokenizer, tmp_path / "value")
    assert torch.equal(
        values(load_scalar(tmp_path / "value", role="value"), sequences), values(value, sequences)
    )


def test_saving_twice_gives_the_same_bytes(
    reward: ScalarModel,
    reward_folder: Path,
    tiny: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    save_reward(reward, tiny_tokenizer, tmp_path / "again", score_shift=SHIFT)
    save_reward(load_scalar(reward_folder), tiny_tokenizer, tmp_path / "loaded", score_shift=SHIFT)
    assert contents(reward_folder) == contents(tmp_path / "again") == contents(tmp_path / "loaded")
    value = value_from_policy(tiny, seed=1)
    save_value(value, tiny_tokenizer, tmp_path / "v1")
    save_value(value, tiny_tokenizer, tmp_path / "v2")
    save_value(load_scalar(tmp_path / "v1"), tiny_tokenizer, tmp_path / "v3")
    assert contents(tmp_path / "v1") == contents(tmp_path / "v2") == contents(tmp_path / "v3")
    for folder in (reward_folder, tmp_path / "v1"):
        check_folder(folder)
        assert all(str(tmp_path).encode() not in content for content in contents(folder).values())


def test_saving_leaves_the_model_usable(
    reward: ScalarModel, reward_folder: Path, sequences: Sequences
) -> None:
    scores(reward, sequences).sum().backward()
    assert reward.head.weight.grad is not None
    assert all(parameter.device.type == "cpu" for parameter in reward.parameters())


def test_an_architecture_without_that_class_has_a_layout_of_its_own(
    tiny_tokenizer: PreTrainedTokenizerBase, sequences: Sequences, tmp_path: Path
) -> None:
    config = GraniteConfig(
        vocab_size=100, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    save_policy(AutoModelForCausalLM.from_config(config), tiny_tokenizer, tmp_path / "policy")
    reward = reward_with_language_head(tmp_path / "policy", seed=1, device=CPU)
    save_reward(reward, tiny_tokenizer, tmp_path / "reward", score_shift=SHIFT)
    assert (tmp_path / "reward" / "head.safetensors").is_file()
    torch.testing.assert_close(
        scores(load_scalar(tmp_path / "reward", role="reward"), sequences), scores(reward, sequences) - SHIFT
    )
    assert value_from_reward(tmp_path / "reward").head.bias.tolist() == [-SHIFT]


def test_a_fresh_head_is_small_and_made_by_its_seed_alone(tiny: Path) -> None:
    before = torch.get_rng_state()
    first, same, other = (
        reward_with_language_head(tiny, seed=seed, device=CPU).head.weight for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    with torch.no_grad():
        assert (
            0.05
            < float(scores(reward_with_language_head(tiny, seed=1, device=CPU), long_sequences()).std())
            < 0.2
        )
    assert value_from_policy(tiny, seed=1).head.bias.tolist() == [0.0]


def test_a_fresh_value_head_on_the_policys_own_trunk_is_that_of_a_value_model(tiny: Path) -> None:
    policy = load_policy(tiny, dtype=torch.bfloat16)
    head, expected = fresh_value_head(policy, seed=4), value_from_policy(tiny, seed=4).head
    assert head.weight.dtype == torch.float32 and head.weight.requires_grad
    assert torch.equal(head.weight, expected.weight)
    assert head.bias.tolist() == [0.0]
    assert not torch.equal(head.weight, fresh_value_head(policy, seed=5).weight)


def test_the_trunk_is_the_policys(tiny: Path, reward: ScalarModel) -> None:
    policy = load_policy(tiny).base_model.state_dict()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in reward.backbone.state_dict().items())


def test_scalars_are_float32_from_half_precision_trunks_and_under_autocast(
    tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, sequences: Sequences, tmp_path: Path
) -> None:
    model = value_from_policy(tiny, seed=1, dtype=torch.bfloat16)
    assert values(model, sequences).dtype == torch.float32
    assert model.head.weight.dtype == torch.float32
    save_value(model, tiny_tokenizer, tmp_path)
    assert torch.equal(load_scalar(tmp_path, dtype=torch.bfloat16).head.weight, model.head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert values(value_from_policy(tiny, seed=1), sequences).dtype == torch.float32


def test_gradients_reach_trunk_and_head(tiny: Path, sequences: Sequences) -> None:
    model = value_from_policy(tiny, seed=1)
    values(model, sequences)[sequences.response_mask].square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_empty_response_is_refused(tiny: Path, reward: ScalarModel) -> None:
    sequences = collate([[1], [1]], [[5], []], pad_token_id=0)
    with pytest.raises(ValueError, match="the response of row 1 has no tokens"):
        scores(reward, sequences)
    with pytest.raises(ValueError, match="the response of row 1 has no tokens"):
        values(value_from_policy(tiny, seed=1), sequences)


def test_a_shift_that_is_not_a_number_is_refused(
    reward: ScalarModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="score_shift=nan is not finite"):
        save_reward(reward, tiny_tokenizer, tmp_path, score_shift=float("nan"))


def test_roles_are_not_mixed_up(
    tiny: Path,
    reward: ScalarModel,
    reward_folder: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    value = value_from_policy(tiny, seed=1)
    with pytest.raises(ValueError, match="save a value model with save_value"):
        save_reward(value, tiny_tokenizer, tmp_path / "x", score_shift=0.0)
    with pytest.raises(ValueError, match="save a reward model with save_reward"):
        save_value(reward, tiny_tokenizer, tmp_path / "x")
    with pytest.raises(ValueError, match="holds a reward model, where a value model is needed"):
        load_scalar(reward_folder, role="value")
    save_value(value, tiny_tokenizer, tmp_path / "value")
    with pytest.raises(ValueError, match="holds a value model, where a reward model is needed"):
        value_from_reward(tmp_path / "value")
    with pytest.raises(UnsafeModel, match="holds no reward or value model"):
        load_scalar(tiny)


def test_a_folder_without_its_head_is_refused(tiny: Path, reward_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "headless")
    shutil.copy(reward_folder / "scalar.json", tmp_path / "headless")
    with pytest.raises(UnsafeModel, match=r"score.weight"):
        load_scalar(tmp_path / "headless")
    (tmp_path / "headless" / "scalar.json").write_text(json.dumps({"role": "queen"}))
    with pytest.raises(UnsafeModel, match=r"scalar.json"):
        load_scalar(tmp_path / "headless")


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_found_and_frozen_in_every_family(name: str) -> None:
    config, of_attention = ATTENTION[name]
    backbone = AutoModel.from_config(config)
    freeze_attention(ScalarModel(backbone, torch.nn.Linear(16, 1)))
    frozen = {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in backbone.named_parameters() if of_attention in name} != set()


def test_a_model_without_attention_is_refused() -> None:
    class Recurrent(torch.nn.Module):
        pass

    with pytest.raises(ValueError, match="freeze_critic=attention finds no attention module in Recurrent"):
        freeze_attention(ScalarModel(Recurrent(), torch.nn.Linear(16, 1)))  # type: ignore[arg-type]
