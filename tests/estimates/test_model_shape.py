"""Numbers of weights equal those of transformers' own models, and published ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from vantage.estimates.model_shape import FAMILIES, model_shape
from vantage.models import model_config
from vantage.models.builtin import builtin_config
from vantage.models.model_config import BUILTIN_CONFIGS, ModelConfig, UnreadableConfig, read_config

SMALL = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 24},
    "gemma": {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96, "head_dim": 24},
    "gpt2": {"n_head": 4, "n_positions": 40},
    "gpt_neox": {"num_attention_heads": 4, "intermediate_size": 256},
}


def shape_of(fields: dict[str, Any]) -> Any:
    return model_shape(ModelConfig(fields, None, None))


def test_every_family_is_compared() -> None:
    assert SMALL.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", SMALL)
def test_the_weights_are_those_of_transformers(kind: str) -> None:
    sizes = {"n_embd": 64, "n_layer": 3} if kind == "gpt2" else {"hidden_size": 64, "num_hidden_layers": 3}
    config = AutoConfig.for_model(kind, vocab_size=101, **sizes, **SMALL[kind])
    with torch.device("meta"):
        language, trunk = AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)
    shape = shape_of(config.to_dict())
    assert shape.weights == sum(parameter.numel() for parameter in language.parameters())
    assert shape.trunk_weights == sum(parameter.numel() for parameter in trunk.parameters())


@pytest.mark.parametrize(
    ("fields", "published"),
    [
        (
            {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
             "num_attention_heads": 32, "vocab_size": 32000},
            6_738_415_616,  # Llama 2 7B
        ),
        (
            {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
            8_030_261_248,  # Llama 3 8B
        ),
        (
            {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
             "n_positions": 1024},
            124_439_808,  # GPT-2 small
        ),
    ],
)  # fmt: skip
def test_the_weights_are_those_that_were_published(fields: dict[str, Any], published: int) -> None:
    assert shape_of(fields).weights == published


@pytest.mark.parametrize("name, weights", [("tiny", 669_312), ("nano", 472_704)])
def test_the_built_in_models_are_described_as_they_are_built(name: str, weights: int) -> None:
    config = builtin_config(name).to_dict()
    fields = BUILTIN_CONFIGS[name]
    assert {name: config[name] for name in fields} == fields
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(builtin_config(name))
    built = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(dict(fields)).weights == built == weights


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_local_experts=8 is a mixture of experts"):
        shape_of({**BUILTIN_CONFIGS["tiny"], "num_local_experts": 8})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match="no hidden_size or n_embd or d_model"):
        shape_of({"vocab_size": 5})


def test_an_unknown_architecture_is_counted_as_a_llama_and_says_so() -> None:
    shape = shape_of({**BUILTIN_CONFIGS["tiny"], "model_type": "novel"})
    assert shape.weights == shape_of(dict(BUILTIN_CONFIGS["tiny"])).weights
    assert shape.note == "model_type=novel is counted as a Llama"


def test_weights_are_counted_in_the_heads_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(BUILTIN_CONFIGS["tiny"])))
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    config = read_config(str(tmp_path))
    assert (config.num_weights, config.folder) == (3 * 5 + 7 + 2, tmp_path)
    assert model_shape(config).weights == 24


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no safetensors file"),
        (b"\xff" * 16, "a header of"),
        (b"\x02\0\0\0\0\0\0\0[]", "is no safetensors file"),
        (b"\x09\0\0\0\0\0\0\0" + b'{"a": 3} ', "is no safetensors file"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableConfig, match=message):
        read_config(str(tmp_path))


def test_a_header_may_have_exactly_the_most_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(BUILTIN_CONFIGS["tiny"])))
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    length = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    monkeypatch.setattr(model_config, "MAX_HEADER_BYTES", length)
    assert read_config(str(tmp_path)).num_weights == 15
    monkeypatch.setattr(model_config, "MAX_HEADER_BYTES", length - 1)
    with pytest.raises(UnreadableConfig, match=f"a header of {length} bytes"):
        read_config(str(tmp_path))


def test_a_model_of_the_hub_is_read_from_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789" * 4
    source = f"hub:some/model@{commit}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnreadableConfig, match=r"not in the local cache.*hf download some/model config.json"):
        read_config(source)
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(dict(BUILTIN_CONFIGS["tiny"])))
    assert read_config(source).fields == BUILTIN_CONFIGS["tiny"]
