"""pass@k equals the mean over every choice of k responses; distinct n-grams are counted by hand."""

import itertools
import math

import pytest
import torch

from vantage.algorithms.response_statistics import (
    distinct_bigrams,
    distinct_ngrams,
    pass_at_k,
    repeated_trigrams,
)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_response(n: int) -> None:
    for k in range(1, n + 1):
        shares = []
        for right in range(n + 1):
            verdicts = [1] * right + [0] * (n - right)
            choices = list(itertools.combinations(verdicts, k))
            shares.append(sum(map(max, choices)) / len(choices))
        found = pass_at_k(torch.arange(n + 1), num_samples=n, k=k)
        assert found.tolist() == pytest.approx(shares)


def test_pass_at_k_is_unbiased_where_the_plain_estimate_is_not() -> None:
    """Responses are right with p = 0.3. Over all outcomes of 10, pass@4 has the mean 1 − 0.7^4, and 1 − (1 − c/n)^4 has
    a smaller one."""
    n, k, p = 10, 4, 0.3
    chance = torch.tensor([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    mean = (chance * pass_at_k(torch.arange(n + 1), num_samples=n, k=k)).sum().item()
    plain = (chance * (1 - (1 - torch.arange(n + 1) / n) ** k)).sum().item()
    assert mean == pytest.approx(1 - 0.7**4)
    assert plain < mean - 0.02


def test_pass_at_k_is_exact_for_many_samples() -> None:
    """Where 1 of 256 samples is right, half of all choices of 128 samples contain it."""
    assert pass_at_k(torch.tensor([1, 256, 0]), num_samples=256, k=128).tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("num_right", "k", "told"), [(1, 3, "k=3 of num_samples=2"), (1, 0, "k=0 of"), (3, 1, "outside of 0 to")]
)
def test_wrong_numbers_are_refused(num_right: int, k: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pass_at_k(torch.tensor([num_right]), num_samples=2, k=k)


def test_distinct_ngrams_by_hand() -> None:
    """In (1 2 1 2) and (1 2), 2 of 6 unigrams are distinct, 2 of the 4 pairs 12 21 12 12, and both triples 121, 212."""
    prompts = [[[1, 2, 1, 2], [1, 2]], [[7, 7], []], [[], []]]
    assert distinct_ngrams(prompts, n=1).tolist()[:2] == [2 / 6, 1 / 2]
    assert distinct_ngrams(prompts, n=2).tolist()[:2] == [2 / 4, 1.0]
    assert distinct_ngrams(prompts[:1], n=3).tolist() == [1.0]
    assert distinct_ngrams(prompts, n=3).isnan().tolist() == [False, True, True]
    with pytest.raises(ValueError, match="n=0"):
        distinct_ngrams(prompts, n=0)


def padded(responses: list[list[int]], *, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (B,T) with a padding id that is a token of the responses too, and the mask of the responses."""
    ids = torch.tensor([[*each, *[7] * (width - len(each))] for each in responses])
    return ids, torch.tensor([[k < len(each) for k in range(width)] for each in responses])


def ngrams(response: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(response[i : i + n]) for i in range(len(response) - n + 1)]


@pytest.mark.parametrize("seed", range(5))
def test_repetition_is_as_counted_with_sets(seed: int) -> None:
    """Repetition equals a count with Python's sets, with ids up to the largest allowed one and padding that looks like
    tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    known = [0, 7, 2**21 - 1]
    responses = [
        [known[int(i)] for i in torch.randint(3, (int(length),), generator=generator)]
        for length in torch.randint(1, 13, (20,), generator=generator)
    ]
    ids, mask = padded(responses, width=14)
    for found, response in zip(repeated_trigrams(ids, mask).tolist(), responses, strict=True):
        grams = ngrams(response, 3)
        if grams:
            assert found == pytest.approx(1 - len(set(grams)) / len(grams))
        else:
            assert math.isnan(found)
    pairs = [gram for response in responses for gram in ngrams(response, 2)]
    assert distinct_bigrams(ids, mask) == pytest.approx(len(set(pairs)) / len(pairs))


def test_a_loop_repeats_and_a_text_without_repetition_does_not() -> None:
    ids, mask = padded([[1, 2] * 6, list(range(10, 22))], width=12)
    assert repeated_trigrams(ids, mask).tolist() == pytest.approx([0.8, 0.0])  # 2 of 10 are new


def test_no_ngram_is_undefined_and_a_huge_id_is_refused() -> None:
    ids, mask = padded([[1]], width=1)
    assert math.isnan(distinct_bigrams(ids, mask))
    assert math.isnan(repeated_trigrams(ids, mask).item())
    with pytest.raises(ValueError, match=r"id 2097152 is not below 2\^21"):
        distinct_bigrams(torch.tensor([[2**21, 1]]), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="both are"):
        distinct_bigrams(ids, mask.T.repeat(2, 1))
