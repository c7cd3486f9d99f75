"""The responses of the tests' own servers are what transformers makes of the same weights."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.single_row import respond


@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": 2, "tie_word_embeddings": True}], ids=["plain", "grouped, tied"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_ids_and_log_probabilities_are_those_of_transformers(changes: Any, temperature: float) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        **changes,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = [5, 9, 2, 30, 7]
    found = respond(model, prompt, max_new_tokens=20, temperature=temperature, eos_token_ids=[1, 4], seed=8)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + found.ids])).logits[0, len(prompt) - 1 : -1]
    expected = (logits.double() / (temperature or 1.0)).log_softmax(dim=-1)
    of_ids = expected.gather(1, torch.tensor(found.ids)[:, None])[:, 0]
    assert found.logprobs == pytest.approx(of_ids.tolist(), abs=2e-5)
    assert found.ended == (len(found.ids) < 20)
    if temperature == 0:
        assert found.ids == logits.argmax(dim=-1).tolist()


def test_a_response_depends_on_its_seed_and_ends_with_a_token_that_ends() -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    drawn = [
        respond(model, [3, 4], max_new_tokens=30, temperature=1.0, eos_token_ids=[7, 8], seed=seed)
        for seed in (1, 1, *range(2, 60))
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(each.ids) for each in drawn}) > 50, "other seeds give others"
    for each in drawn:
        assert not {7, 8} & {*each.ids[:-1]}
        assert each.ended == (each.ids[-1] in (7, 8)) and (each.ended or len(each.ids) == 30)
    firsts = [each.ids[0] for each in drawn[1:]]
    assert len(set(firsts)) > 10, "nearly uniform"
