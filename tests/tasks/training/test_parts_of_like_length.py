"""Losses that compare rows: what is computed in parts of like length is what one padded pass finds, with less padding."""

from pathlib import Path

import pytest
import torch

from models.builtin import build_tiny
from models.folders import load_policy
from models.heads import ScalarModel, reward_with_language_head, scores, scores_and_logprobs
from models.pass_counts import taken_counts
from models.policy import PolicyModel
from models.scalar_head import fresh_head
from models.sequences import Sequences, collate
from schemas.recipe.pass_limits import UNLIMITED, PassLimits
from tasks.data.examples import Completions
from tasks.reward_model import pair_scores_and_logprobs
from tasks.training import ranks
from tasks.training.passes import in_parts_of_like_length, passes

DRAW = torch.Generator().manual_seed(5)


def ragged(rows: int, *, shortest: int = 3, longest: int = 90) -> Sequences:
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=DRAW).tolist()
    responses = [torch.randint(4, 90, (length,), generator=DRAW).tolist() for length in lengths]
    return collate([[1, 7, 8 + row % 5] for row in range(rows)], responses, pad_token_id=0)


@pytest.fixture
def reward(tmp_path: Path) -> ScalarModel:
    build_tiny(tmp_path, seed=2)
    backbone = load_policy(tmp_path).model
    return ScalarModel(backbone, fresh_head(backbone, seed=3, bias=False))


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each.grad.clone() for each in module.parameters() if each.grad is not None]


def test_scores_and_their_gradients_are_those_of_one_pass(reward: ScalarModel) -> None:
    batch = ragged(40)
    weights = torch.randn(40, generator=DRAW)
    found, found_gradients = [], []
    for compute in (
        lambda: scores(reward, batch),
        lambda: in_parts_of_like_length(batch, lambda rows, _: scores(reward, rows)),
    ):
        reward.zero_grad()
        taken_counts()
        each = compute()
        (each * weights).sum().backward()
        found.append((each.detach(), taken_counts()))
        found_gradients.append(gradients(reward))
    (whole, of_one), (parts, of_parts) = found
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(found_gradients[1], found_gradients[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    tokens = int(batch.attention_mask.sum())
    assert int(of_one.tokens) == int(of_parts.tokens) == tokens
    assert of_one.passes == 1 < of_parts.passes < 20
    assert 1 - tokens / of_one.positions > 0.3
    assert 1 - tokens / of_parts.positions < 0.08


def test_log_probabilities_come_back_to_their_places(tmp_path: Path) -> None:
    build_tiny(tmp_path, seed=2)
    policy = PolicyModel(load_policy(tmp_path))
    batch = ragged(9)
    with torch.no_grad():
        whole = policy.logprobs(batch, temperature=1.0).logprobs
        parts = in_parts_of_like_length(
            batch, lambda rows, _: policy.logprobs(rows, temperature=1.0).logprobs
        )
    assert parts.shape == whole.shape
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert torch.equal(parts != 0, batch.response_mask)


def test_chosen_responses_have_log_probabilities_and_all_have_scores(tmp_path: Path) -> None:
    """The longest row is a rejected one, so that the chosen ones' columns end earlier."""
    build_tiny(tmp_path, seed=2)
    reward = reward_with_language_head(tmp_path, seed=3, device=torch.device("cpu"))
    chosen, rejected = (
        [[11] * length for length in (40, 3, 5, 38)],
        [[12] * length for length in (70, 71, 4, 5)],
    )
    pairs = Completions(
        prompt_ids=[[1, 7, 9 + row] for row in range(4)],
        response_ids={"chosen": chosen, "rejected": rejected},
        pad_token_id=0,
        num_too_long=0,
    )
    batch = pairs.batch(range(4))
    with torch.no_grad():
        taken_counts()
        expected = scores_and_logprobs(reward, batch, first_rows=4)
        assert taken_counts().passes == 1
        found = pair_scores_and_logprobs(reward, batch, with_logprobs=True)
        assert taken_counts().passes > 1
        alone, none = pair_scores_and_logprobs(reward, batch, with_logprobs=False)
    assert none is None and found[1] is not None
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(alone, expected[0], rtol=1e-4, atol=1e-6)
    assert found[1].shape == (4, 71)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_rows_of_one_length_are_one_pass_with_the_same_bits(reward: ScalarModel) -> None:
    batch = ragged(6, shortest=20, longest=20)
    with torch.no_grad():
        taken_counts()
        parts = in_parts_of_like_length(batch, lambda rows, _: scores(reward, rows))
        assert taken_counts().passes == 1
        assert torch.equal(parts, scores(reward, batch))


def test_sharded_weights_are_gathered_for_one_pass(
    reward: ScalarModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may have other lengths, and all of them gather in each pass."""
    monkeypatch.setattr(ranks, "are_sharded", lambda: True)
    taken_counts()
    with torch.no_grad():
        in_parts_of_like_length(ragged(12), lambda rows, _: scores(reward, rows))
    assert taken_counts().passes == 1


def test_a_pass_that_is_divided_is_cut_by_its_limits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [400, 3, 3, 200, 3, 90]
    assert len(list(passes(lengths, UNLIMITED))) > 1
    (whole,) = passes(lengths, UNLIMITED, is_divided=True)
    assert whole.rows == [0, 1, 2, 3, 4, 5]
    assert len(list(passes(lengths, PassLimits(rows=4), is_divided=True))) == 2
    monkeypatch.setattr(ranks, "are_sharded", lambda: True)
    assert len(list(passes(lengths, UNLIMITED, is_divided=True))) > 1, "nothing is divided then"
