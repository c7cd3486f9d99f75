"""Dynamic sampling, on hand-made draws, drops the right groups, refills them in order, and ends where it should."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vantage.models.sequences import collate
from vantage.schemas.conversations import Message
from vantage.tasks.rewards.scoring import Scores, Summand
from vantage.tasks.rollout.group_sampling import (
    Filled,
    fill,
    groups_without_contrast,
    join_scored,
    uniform_groups,
)
from vantage.tasks.rollout.rollouts import Sampled, Scored

Draw = Callable[[int], Scored]
PAD = 0


def drawn(rounds: list[list[tuple[float, ...]]], *, missing_eos: float = 0.0) -> tuple[Draw, list[int]]:
    """Return draws of these groups' scores, and the numbers of the rounds asked for, as they come.

    Response s of group g in round r is called ``r.g.s``, has the single token 100·r + 10·g + s + 1, and its prompt
    is as many tokens long as its round's number says. Of each group, the last is cut off and loses ``missing_eos``.
    The sampler's log-probability of a token is −1 times its id.
    """
    asked: list[int] = []

    def draw(number: int) -> Scored:
        asked.append(number)
        groups = rounds[number]
        named = [(g, s) for g, group in enumerate(groups) for s in range(len(group))]
        weighted = torch.tensor([score for group in groups for score in group])
        ended = torch.tensor([s + 1 < len(groups[g]) for g, s in named])
        return Scored(
            sampled=Sampled(
                prompts=[f"{number}.{g}" for g, _ in named],
                answers=[f"answer of {number}.{g}" if g else None for g, _ in named],
                responses=[f"{number}.{g}.{s}" for g, s in named],
                sequences=collate(
                    [[7] * (number + 1) for _ in named],
                    [[100 * number + 10 * g + s + 1] for g, s in named],
                    pad_token_id=PAD,
                ),
                ended=ended,
                sampler_logprobs=torch.tensor([[-100.0 * number - 10 * g - s - 1] for g, s in named]),
            ),
            scores=Scores(
                total=weighted - missing_eos * (~ended).float(),
                weighted_sum=weighted,
                by_term={"verifier": 10 * weighted},
            ),
        )

    return draw, asked


def filled(rounds: list[list[tuple[float, ...]]], *, max_rounds: int = 10, **drawing: float) -> Filled:
    draw, asked = drawn(rounds, **drawing)
    result = fill(draw, samples_per_prompt=2, max_rounds=max_rounds, pad_token_id=PAD)
    assert asked == list(range(result.rounds))
    return result


def responses(result: Filled) -> list[str]:
    """Return which responses were taken, and assert that all else about them came along."""
    sampled, scores = result.scored.sampled, result.scored.scores
    for row, name in enumerate(sampled.responses):
        number, group, sample = map(int, name.split("."))
        assert sampled.prompts[row] == f"{number}.{group}"
        assert sampled.answers[row] == (f"answer of {number}.{group}" if group else None)
        assert sampled.sequences.response_ids[row].tolist() == [100 * number + 10 * group + sample + 1]
        assert sampled.sequences.response_mask[row].tolist() == [True]
        assert sampled.sequences.prompt_lengths[row] == number + 1
        ids = sampled.sequences.input_ids[row, : number + 2].tolist()
        assert ids == [7] * (number + 1) + [100 * number + 10 * group + sample + 1]
        assert sampled.sequences.attention_mask[row].sum() == number + 2
        assert bool(sampled.ended[row]) == (sample == 0)
        assert sampled.sampler_logprobs[row].tolist() == [-100.0 * number - 10 * group - sample - 1]
        assert scores.by_term["verifier"][row] == 10 * scores.weighted_sum[row]
    assert len(sampled.sequences) == len(scores.total) == len(sampled.responses)
    return sampled.responses


def test_the_samplers_log_probabilities_stay_with_their_tokens_through_selecting_and_joining() -> None:
    """Responses differ in length. Log-probabilities of selected ones are trimmed, and of joined ones padded with 0."""

    def scored(lengths: list[int], first: float) -> Scored:
        ids = [list(range(3, 3 + length)) for length in lengths]
        rows = [torch.arange(length) + first + 10 * row for row, length in enumerate(lengths)]
        zeros = torch.zeros(len(lengths))
        return Scored(
            sampled=Sampled(
                prompts=["p"] * len(lengths),
                answers=[None] * len(lengths),
                responses=["r"] * len(lengths),
                sequences=collate([[1]] * len(lengths), ids, pad_token_id=PAD),
                ended=zeros.bool(),
                sampler_logprobs=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            ),
            scores=Scores(total=zeros, weighted_sum=zeros, by_term={}),
        )

    short = scored([4, 1, 2], 100.0).select([2, 1])
    assert short.sampled.sampler_logprobs.tolist() == [[120.0, 121.0], [110.0, 0.0]]
    joined = join_scored([short, scored([1, 3], 200.0)], pad_token_id=PAD).sampled
    expected = [[120.0, 121.0, 0.0], [110.0, 0.0, 0.0], [200.0, 0.0, 0.0], [210.0, 211.0, 212.0]]
    assert joined.sampler_logprobs.tolist() == expected
    assert joined.sampler_logprobs.shape == joined.sequences.response_ids.shape
    assert torch.equal(joined.sampler_logprobs != 0, joined.sequences.response_mask)


def test_joined_rows_keep_the_turns_of_their_prompts() -> None:
    """A row of a batch without conversations has None beside rows of a batch with them; no batch with them: no list."""
    draw, _ = drawn([[(0.0, 1.0)], [(1.0, 0.0)]])
    plain, told = draw(0), draw(1)
    turns = [[Message(role="user", content=text, extra=None)] for text in ("a", "b")]
    told = replace(told, sampled=replace(told.sampled, conversations=turns))

    def joined(*parts: Scored) -> object:
        return join_scored(list(parts), pad_token_id=PAD).sampled.conversations

    assert joined(plain, told) == [None, None, *turns]
    assert joined(told, plain) == [*turns, None, None]
    assert joined(plain, plain) is None


def test_groups_of_one_score_are_uniform() -> None:
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert uniform_groups(scores, samples_per_prompt=3).tolist() == [True, False, True]
    assert uniform_groups(scores, samples_per_prompt=1).tolist() == [True] * 9
    assert uniform_groups(scores, samples_per_prompt=9).tolist() == [False]


def test_groups_whose_scores_differ_by_rounding_alone_are_uniform() -> None:
    one, other = (sum(map(torch.tensor, order)).item() for order in ([0.3, 0.2, 0.2], [0.2, 0.2, 0.3]))
    assert one != other
    scores = torch.tensor([one, other, -other, -one, one, one + 1e-5, 0.0, 1e-9])
    assert uniform_groups(scores, samples_per_prompt=2).tolist() == [True, True, False, False]


def test_a_rollout_of_mixed_groups_is_taken_as_it_is() -> None:
    result = filled([[(1.0, 0.0), (0.0, 1.0)]])
    assert responses(result) == ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]
    assert (result.rounds, result.uniform_share) == (1, 0.0)


def test_uniform_groups_make_room_for_those_of_later_rounds_in_order() -> None:
    """3 groups are wanted. Round 0 has one, round 1 none, and round 2 three, of which the first two are taken."""
    result = filled(
        [
            [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)],
            [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0)],
            [(0.0, 1.0), (1.0, 0.0), (0.0, 1.0)],
            [(0.0, 1.0), (1.0, 0.0), (0.0, 1.0)],
        ]
    )
    assert responses(result) == ["0.1.0", "0.1.1", "2.0.0", "2.0.1", "2.1.0", "2.1.1"]
    assert result.rounds == 3
    # 5 of the 9 groups sampled: two of round 0, three of round 1; the one that was not needed counts too
    assert result.uniform_share == pytest.approx(5 / 9)


def test_at_the_bound_what_is_missing_is_filled_with_dropped_groups() -> None:
    """3 groups are wanted, and two rounds have one mixed group. It is taken with the two oldest uniform ones."""
    rounds = [
        [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0)],
        [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)],
        [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0)],
    ]
    result = filled(rounds, max_rounds=2)
    assert responses(result) == ["0.0.0", "0.0.1", "0.1.0", "0.1.1", "1.1.0", "1.1.1"]
    assert (result.rounds, result.uniform_share) == (2, 5 / 6)


def test_one_round_is_never_refilled() -> None:
    result = filled([[(1.0, 1.0), (1.0, 0.0)]], max_rounds=1)
    assert responses(result) == ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]
    assert (result.rounds, result.uniform_share) == (1, 0.5)


def test_where_all_are_uniform_the_first_rollout_is_returned() -> None:
    result = filled([[(1.0, 1.0), (0.0, 0.0)], [(1.0, 1.0), (1.0, 1.0)]], max_rounds=2)
    assert responses(result) == ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]
    assert (result.rounds, result.uniform_share) == (2, 1.0)


def test_what_is_paid_for_being_cut_off_does_not_make_equal_answers_differ() -> None:
    """Both responses are right, but one was cut off and lost 0.5. No shaping decides whether a group is uniform."""
    result = filled([[(1.0, 1.0)], [(1.0, 0.0)]], missing_eos=0.5)
    assert responses(result) == ["1.0.0", "1.0.1"]
    assert result.scored.scores.total.tolist() == [1.0, -0.5]
    # the reverse: what was cut does not make different answers equal
    result = filled([[(0.5, 1.0)]], missing_eos=0.5)
    assert result.scored.scores.total.tolist() == [0.5, 0.5]
    assert (result.rounds, result.uniform_share) == (1, 0.0)


def test_a_group_whose_scores_differ_though_their_sum_does_not_is_kept_where_each_counts() -> None:
    first, second = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 2.0, 2.0, 0.0, 1.0])
    recorded = torch.tensor([5.0, 6.0, 5.0, 6.0, 5.0, 6.0])
    scores = Scores(
        total=first + second,
        weighted_sum=first + second,
        by_term={},
        summands=(Summand(1.0, first), Summand(1.0, second), Summand(0.0, recorded)),
    )
    assert groups_without_contrast(scores, samples_per_prompt=2, each=False).tolist() == [True, True, False]
    assert groups_without_contrast(scores, samples_per_prompt=2, each=True).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("each", "kept"),
    [
        (False, ["0.1.0", "0.1.1", "1.0.0", "1.0.1"]),
        (True, ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]),
    ],
)
def test_a_rollout_is_filled_with_groups_that_differ_in_a_score_where_each_counts(
    each: bool, kept: list[str]
) -> None:
    """Group 0.0 differs in both scores and not in their sum; 1.1 in none. Each response keeps its own scores."""
    draw, _ = drawn([[(2.0, 2.0), (1.0, 2.0)], [(0.0, 3.0), (5.0, 5.0)]])
    first = {
        "0.0.0": 2.0,
        "0.0.1": 0.5,
        "0.1.0": 1.0,
        "0.1.1": 1.0,
        "1.0.0": 0.0,
        "1.0.1": 3.0,
        "1.1.0": 5.0,
        "1.1.1": 5.0,
    }

    def with_parts(number: int) -> Scored:
        scored = draw(number)
        part = torch.tensor([first[name] for name in scored.sampled.responses])
        rest = scored.scores.weighted_sum - part
        parts = (Summand(1.0, part), Summand(1.0, rest))
        return replace(scored, scores=replace(scored.scores, summands=parts))

    found = fill(with_parts, samples_per_prompt=2, max_rounds=10, pad_token_id=PAD, each=each)
    assert responses(found) == kept
    part, rest = found.scored.scores.summands
    assert part.scores.tolist() == [first[name] for name in kept]
    assert torch.equal(part.scores + rest.scores, found.scored.scores.weighted_sum)


def test_parts_of_scores_are_joined_where_every_batch_has_them() -> None:
    """Collected responses have no parts; the others keep each weight with its scores."""
    draw, _ = drawn([[(1.0, 0.0)], [(0.0, 1.0)]])
    parts = [draw(0), draw(1)]
    joined = join_scored(parts, pad_token_id=0)
    assert joined.scores.summands == ()
    with_parts = [
        replace(
            each,
            scores=replace(
                each.scores, summands=(Summand(2.0, each.scores.total),), steps=each.scores.total[:, None]
            ),
        )
        for each in parts
    ]
    [both] = join_scored(with_parts, pad_token_id=0).scores.summands
    assert (both.weight, both.scores.tolist()) == (2.0, joined.scores.total.tolist())
    mixed = join_scored([with_parts[0], parts[1]], pad_token_id=0)
    assert mixed.scores.summands == () and mixed.scores.steps is None
    assert mixed.scores.total.tolist() == joined.scores.total.tolist()
