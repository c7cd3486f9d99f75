"""A reward model scores equal responses equally, whatever else is in the batch."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from vantage.models.heads import ScalarModel, scores
from vantage.models.sequences import Sequences, collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.rewards.model_scores import ModelScores
from vantage.tasks.rewards.term_scores import Responses
from vantage.tasks.rollout.group_sampling import uniform_groups

CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)  # fmt: skip


def reward_model() -> ScalarModel:
    torch.manual_seed(0)
    backbone = LlamaModel(CONFIG).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return ScalarModel(backbone, nn.Linear(16, 1, bias=False), score_shift=0.25)


def score(sequences: Sequences, *, limits: PassLimits) -> torch.Tensor:
    count = len(sequences)
    given = Responses(sequences, [""] * count, [""] * count, [None] * count, torch.device("cpu"), limits)
    with torch.no_grad():
        found: torch.Tensor = ModelScores(reward_model())(given)
    return found


@pytest.mark.slow
def test_equal_responses_have_one_score_whatever_stands_beside_them() -> None:
    """Forty copies of a response are scored between others of many lengths, in microbatches of other widths."""
    draw = torch.Generator().manual_seed(1)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 97, (length,), generator=draw).tolist()

    prompt, response = ids(5), ids(7)
    others = [ids(1 + place % 23) for place in range(40)]
    prompts = [each for place in range(40) for each in (prompt, ids(1 + place % 4))]
    responses = [each for other in others for each in (response, other)]
    sequences = collate(prompts, responses, pad_token_id=0)
    for limits in (PassLimits(), PassLimits(7), PassLimits(3), PassLimits(tokens=90)):
        found = score(sequences, limits=limits)
        assert found[::2].unique().numel() == 1
        assert bool(uniform_groups(found[::2], samples_per_prompt=40).all())
        assert found[1::2].unique().numel() == 40
        with torch.no_grad():
            alone = [scores(reward_model(), sequences.select([row])) for row in range(80)]
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_another_prompt_and_another_split_of_the_same_ids_are_other_responses() -> None:
    sequences = collate([[5, 6], [5], [5, 6], [7, 6]], [[8], [6, 8], [8], [8]], pad_token_id=0)
    assert sequences.first_equal_rows().tolist() == [0, 1, 0, 3]
