"""Passes in parts compute rows of like length together, prompts once, and give what one pass gives."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy
from vantage.models.heads import ScalarModel, reward_with_language_head, scores, scores_and_logprobs
from vantage.models.parts import PaddedRows, Parts, in_parts
from vantage.models.pass_counts import taken_counts
from vantage.models.policy import PolicyModel
from vantage.models.scalar_head import fresh_head
from vantage.models.sequences import Sequences, collate
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits
from vantage.tasks.data.examples import Completions
from vantage.tasks.training import ranks
from vantage.tasks.training.cuts import Lengths, alone, filled, shared
from vantage.tasks.training.passes import Pass, laid_out, passes, passes_of

DRAW = torch.Generator().manual_seed(5)
NOT_SHARED = PassLimits(share_prompts=False)


def drawn(count: int) -> list[int]:
    return torch.randint(4, 90, (count,), generator=DRAW).tolist()


def ragged(rows: int, *, shortest: int = 3, longest: int = 90) -> Sequences:
    """Return every prompt once."""
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=DRAW).tolist()
    return collate(
        [[1, 7, 8 + row] for row in range(rows)], [drawn(each) for each in lengths], pad_token_id=0
    )


def groups(prompt_lengths: list[int], responses: list[list[int]]) -> Sequences:
    """Return responses of the given lengths to each prompt."""
    prompts = [drawn(length) for length in prompt_lengths]
    rows = [(prompt, drawn(length)) for prompt, of in zip(prompts, responses, strict=True) for length in of]
    return collate([prompt for prompt, _ in rows], [response for _, response in rows], pad_token_id=0)


@pytest.fixture
def reward(tmp_path: Path) -> ScalarModel:
    build_builtin("tiny", tmp_path, seed=2)
    backbone = load_policy(tmp_path).model
    return ScalarModel(backbone, fresh_head(backbone, seed=3, bias=False))


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each.grad.clone() for each in module.parameters() if each.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "padding"),
    [(ragged(40), 0.08), (groups([30, 30, 7, 30], [[4, 60, 5], [33], [61, 5], [9, 8, 3, 50]]), 0.2)],
)
def test_scores_and_their_gradients_are_those_of_one_pass(
    batch: Sequences, padding: float, reward: ScalarModel
) -> None:
    weights = torch.randn(len(batch), generator=DRAW)
    found, found_gradients = [], []
    for each in (batch, laid_out(batch, UNLIMITED)):
        reward.zero_grad()
        taken_counts()
        of_batch = scores(reward, each)
        (of_batch * weights).sum().backward()
        found.append((of_batch.detach(), taken_counts()))
        found_gradients.append(gradients(reward))
    (whole, of_one), (parts, of_parts) = found
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(found_gradients[1], found_gradients[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert of_one.passes == 1 < of_parts.passes < 20
    assert of_parts.positions < 0.75 * of_one.positions
    assert 1 - int(of_parts.tokens) / of_parts.positions < padding


def test_a_prompt_is_read_once(reward: ScalarModel) -> None:
    """Two prompts of 20 tokens, each with eight responses of 20, take 2 · 20 + 16 · 20 positions, and not 16 · 40."""
    batch = groups([20, 20], [[20] * 8] * 2)
    assert int(batch.attention_mask.sum()) == 640
    for limits, passes_made, positions in ((UNLIMITED, 2, 360), (NOT_SHARED, 1, 640)):
        taken_counts()
        scores(reward, laid_out(batch, limits))
        counts = taken_counts()
        assert (counts.passes, counts.positions, int(counts.tokens)) == (passes_made, positions, positions)


def test_a_prompt_is_read_again_where_that_costs_less() -> None:
    """A prompt of 127 tokens is read again for its second response. With 129, reading it once is worth a pass."""
    assert laid_out(groups([127], [[8, 8]]), UNLIMITED).layout is None
    layout = laid_out(groups([129], [[8, 8]]), UNLIMITED).layout
    assert isinstance(layout, Parts) and layout.prompts


def test_log_probabilities_come_back_to_their_places(tmp_path: Path) -> None:
    build_builtin("tiny", tmp_path, seed=2)
    policy = PolicyModel(load_policy(tmp_path))
    batch = groups([30, 4], [[3, 70, 3, 66], [12, 4]])
    with torch.no_grad():
        whole = policy.logprobs(batch, temperature=1.0).logprobs
        parts = policy.logprobs(laid_out(batch, UNLIMITED), temperature=1.0).logprobs
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert torch.equal(parts != 0, batch.response_mask)


def test_chosen_responses_have_log_probabilities_and_all_have_scores(tmp_path: Path) -> None:
    """The longest row is a rejected one, so that the chosen ones' columns end earlier."""
    build_builtin("tiny", tmp_path, seed=2)
    reward = reward_with_language_head(tmp_path, seed=3, device=torch.device("cpu"))
    sides = {
        "chosen": [[11] * length for length in (40, 3, 5, 38)],
        "rejected": [[12] * length for length in (70, 71, 4, 5)],
    }
    pairs = Completions(
        prompt_ids=[[1, *[7] * 20, 9 + row] for row in range(4)],
        response_ids=sides,
        pad_token_id=0,
        num_too_long=0,
    )
    batch = pairs.batch(range(4))
    with torch.no_grad():
        taken_counts()
        expected = scores_and_logprobs(reward, batch, first_rows=4)
        assert taken_counts().passes == 1
        found = scores_and_logprobs(reward, laid_out(batch, UNLIMITED), first_rows=4)
        assert taken_counts().passes > 2
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)
    assert found[1].shape == (4, 71)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_rows_of_one_length_are_one_pass_with_the_same_bits(reward: ScalarModel) -> None:
    batch = ragged(6, shortest=20, longest=20)
    with torch.no_grad():
        taken_counts()
        parts = scores(reward, laid_out(batch, UNLIMITED))
        assert taken_counts().passes == 1
        assert torch.equal(parts, scores(reward, batch))


def test_sharded_weights_are_gathered_for_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may have other lengths, and all of them gather in each pass."""
    monkeypatch.setattr(ranks, "are_sharded", lambda: True)
    assert laid_out(ragged(12), UNLIMITED).layout is None
    assert all(part.cuts is None for part in passes_of(groups([30], [[4] * 8]), UNLIMITED))


def test_a_pass_that_is_divided_is_cut_by_its_limits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [400, 3, 3, 200, 3, 90]
    assert len(list(passes(lengths, UNLIMITED))) > 1
    (whole,) = passes(lengths, UNLIMITED, is_divided=True)
    assert whole.rows == [0, 1, 2, 3, 4, 5]
    assert len(list(passes(lengths, PassLimits(rows=4), is_divided=True))) == 2
    monkeypatch.setattr(ranks, "are_sharded", lambda: True)
    assert len(list(passes(lengths, UNLIMITED, is_divided=True))) > 1, "nothing is divided then"


# -- which rows, in which parts

LENGTHS = some.lists(
    some.tuples(some.integers(1, 60), some.lists(some.integers(1, 60), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)
LIMITS = some.builds(
    PassLimits, some.one_of(some.none(), some.integers(1, 9)), some.one_of(some.none(), some.integers(1, 400))
)


def positions_of(part: Pass, batch: Sequences) -> int:
    """Return the positions as a model computes them."""
    layout = part.select(batch).layout
    if not isinstance(layout, Parts):
        return len(part.rows) * int(batch.total_lengths[part.rows].max())
    return sum(rows.input_ids.numel() for rows in read_by(layout))


def read_by(layout: Parts) -> list[PaddedRows]:
    return [*layout.prompts, *(rows for rows, _ in layout.parts)]


@given(lengths=LENGTHS, limits=LIMITS)
def test_every_row_is_computed_once_within_the_limits(
    lengths: list[tuple[int, list[int]]], limits: PassLimits
) -> None:
    batch = groups([prompt for prompt, _ in lengths], [responses for _, responses in lengths])
    found = list(passes_of(batch, limits))
    assert sorted(row for part in found for row in part.rows) == list(range(len(batch)))
    for part in found:
        assert limits.rows is None or len(part.rows) <= limits.rows
        assert limits.tokens is None or len(part.rows) == 1 or positions_of(part, batch) <= limits.tokens
        if part.cuts is not None:
            of_parts = [row for each in part.cuts.parts for row in each]
            assert sorted(of_parts) == list(range(len(part.rows)))
    by_length = list(passes_of(batch, replace(limits, share_prompts=False)))
    assert len(found) * 128 + sum(positions_of(each, batch) for each in found) <= sum(
        128 + positions_of(each, batch) for each in by_length
    )


@given(lengths=LENGTHS)
def test_what_is_planned_is_what_is_computed(lengths: list[tuple[int, list[int]]]) -> None:
    batch = groups([prompt for prompt, _ in lengths], [responses for _, responses in lengths])
    of = Lengths(batch)
    for planned in (alone(of.totals), shared(of, range(len(batch)))):
        layout = in_parts(batch, planned.cuts).layout
        assert isinstance(layout, Parts)
        assert planned.num_parts == len(read_by(layout))
        assert planned.positions == sum(rows.input_ids.numel() for rows in read_by(layout))


@given(lengths=LENGTHS, chosen=some.randoms(use_true_random=False))
def test_a_plan_of_some_rows_is_that_of_a_batch_of_them(
    lengths: list[tuple[int, list[int]]], chosen: random.Random
) -> None:
    batch = groups([prompt for prompt, _ in lengths], [responses for _, responses in lengths])
    rows = chosen.sample(range(len(batch)), chosen.randint(1, len(batch)))
    of_them = batch.select(rows)
    assert shared(Lengths(batch), rows) == shared(Lengths(of_them), range(len(rows)))


def test_passes_are_filled_with_the_responses_to_one_prompt_after_the_other() -> None:
    """With prompts of 4, 9 and 4 tokens, passes of at most 30 positions have 9 + 2 · 8, and then 4 + 4 + 4 · 5."""
    batch = groups([4, 9, 4], [[5, 2], [8, 3], [5, 5]])
    lengths = Lengths(batch)
    assert filled(lengths, range(6), PassLimits(tokens=30)) == [[2, 3], [0, 1, 4, 5]]
    assert filled(lengths, range(6), PassLimits(rows=3)) == [[2, 3, 0], [1, 4, 5]]


def test_a_response_without_a_token_shares_no_prompt() -> None:
    """One of three responses to a prompt of 200 tokens is empty, and a part with it would have no column."""
    batch = groups([200, 150], [[0, 8, 8], [9, 9]])
    assert not Lengths(batch).can_share
    assert all(part.cuts is None for part in passes_of(batch, UNLIMITED))
    layout = laid_out(batch, UNLIMITED).layout
    assert isinstance(layout, Parts)
    assert not layout.prompts
    assert Lengths(groups([200, 150], [[1, 8, 8], [9, 9]])).can_share


def test_the_responses_to_a_prompt_are_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = groups([40, 40, 40], [[5] * 6, [5] * 2, [5] * 4])
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    of_ranks = []
    for rank in range(2):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        of_ranks.append([part for part in passes_of(batch, UNLIMITED) if part.weight])
    rows = [sorted(itertools.chain.from_iterable(part.rows for part in mine)) for mine in of_ranks]
    assert rows == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]
