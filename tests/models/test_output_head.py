from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from vantage.models.output_head import check_output_head, output_head

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(config: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_scale_and_cap_are_read_from_the_configuration() -> None:
    gemma = output_head(build(Gemma2Config(**SIZES, final_logit_softcapping=30.0)))
    assert (gemma.scale, gemma.softcap) == (1.0, 30.0)
    granite = output_head(build(GraniteConfig(**SIZES, logits_scaling=8.0)))
    assert (granite.scale, granite.softcap) == (0.125, None)
    cohere = output_head(build(Cohere2Config(**SIZES, logit_scale=0.25)))
    assert (cohere.scale, cohere.softcap) == (0.25, None)
    llama = output_head(build(LlamaConfig(**SIZES)))
    assert (llama.scale, llama.softcap, llama.bias) == (1.0, None, None)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Gemma2Config(**SIZES, final_logit_softcapping=0.5),
        GraniteConfig(**SIZES, logits_scaling=8.0),
        Cohere2Config(**SIZES, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_the_heads_that_are_known_agree_with_their_models(config: object) -> None:
    check_output_head(build(config))


def test_a_head_that_does_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(LlamaConfig(**SIZES))
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.1)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM changes its logits in a way that is not known here"
    ):
        check_output_head(model)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1),
            "MambaForCausalLM keeps no key-value cache",
        ),
        (
            Lfm2Config(**{**SIZES, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"]),
            r"Lfm2ForCausalLM keeps no keys and values in 2 of 3 layers .*attention in every layer",
        ),
    ],
    ids=lambda given: getattr(given, "model_type", None),
)
def test_a_model_whose_layers_keep_a_state_in_place_of_keys_and_values_is_refused(
    config: object, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        check_output_head(build(config))


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = build(LlamaConfig(**SIZES))
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="has no linear output head but Sequential"):
        output_head(model)


def test_loading_checks_the_head(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vantage.models import folders

    seen = []
    monkeypatch.setattr(folders, "check_output_head", seen.append)
    assert seen == [] and [folders.load_policy(tiny)] == seen
