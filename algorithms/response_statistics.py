"""Statistics of several responses to one prompt: the chance that one of k is right, and the diversity of the texts.

Each function gives one number a prompt, so that means over prompts have errors by `vantage.algorithms.uncertainty`. Everything
is computed in float64 on the CPU.
"""

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor

_BITS_OF_ID = 21
"""Bits of a token's id in the number of an n-gram; the largest vocabularies have fewer than 2²⁰ entries."""


def pass_at_k(num_right: Tensor, *, num_samples: int, k: int) -> Tensor:
    """Return the chance that at least one of k responses is right, by prompt: 1 − C(n − c, k)/C(n, k), unbiased.

    `num_right` (P,) integers: c of each prompt's n = `num_samples` responses. (Chen et al., arXiv 2107.03374, eq. 1.)
    With k = 1 it is c/n.

    Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} of num_samples={num_samples} responses; k must be from 1 to num_samples")
    if len(num_right) and not (int(num_right.min()) >= 0 and int(num_right.max()) <= num_samples):
        raise ValueError(f"num_right has numbers outside of 0 to num_samples={num_samples}")
    chances = [1 - comb(num_samples - right, k) / comb(num_samples, k) for right in range(num_samples + 1)]
    return torch.tensor(chances, dtype=torch.float64)[num_right.cpu()]


def distinct_ngrams(responses_of_prompts: Sequence[Sequence[Sequence[int]]], *, n: int) -> Tensor:
    """Return distinct n-grams / n-grams in all responses to a prompt, by prompt (P,); NaN if there is no n-gram.

    This is distinct-n of Li et al., arXiv 1510.03055 §5.3 (there over a whole corpus), within each prompt: the
    diversity for one input of Kirk et al., arXiv 2310.06452 §4. It falls with the length and the number of the
    responses.

    Args:
        responses_of_prompts: prompt → its responses → ids of their tokens.
        n: tokens of an n-gram; no n-gram spans two responses.

    Raises ValueError unless n ≥ 1.
    """
    if n < 1:
        raise ValueError(f"n={n}; an n-gram has one token or more")
    shares = []
    for responses in responses_of_prompts:
        ngrams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
        shares.append(len(set(ngrams)) / len(ngrams) if ngrams else float("nan"))
    return torch.tensor(shares, dtype=torch.float64)


def repeated_trigrams(ids: Tensor, response_mask: Tensor) -> Tensor:
    """Return the share of each response's 3-grams that occur earlier in the same response (B,); NaN for fewer than 3 tokens.

    `ids` (B,T) are those of the responses' tokens, `response_mask` (B,T) is True on a contiguous stretch of each row.
    It is near 0 in ordinary text, near 1 in a loop: seq-rep-n of Welleck et al., arXiv 1908.04319 eq. 8, with n = 3.

    Raises ValueError for unequal shapes, or an id of 2²¹ or more: three of them must fit into 63 bits.
    """
    grams, is_whole = _ngrams(ids, response_mask, n=3)
    ordered = torch.where(is_whole, grams, -1).sort(dim=1).values
    is_new = torch.ones_like(is_whole)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    count = is_whole.sum(dim=1)
    distinct = (is_new & (ordered >= 0)).sum(dim=1)
    return 1 - distinct.double() / count.double()


def distinct_bigrams(ids: Tensor, response_mask: Tensor) -> float:
    """Return distinct 2-grams / 2-grams over all responses at once; NaN if there is none.

    This is distinct-2 of Li et al., arXiv 1510.03055 §5.3, with one rollout as the corpus. Arguments as in
    `repeated_trigrams`.
    """
    grams, is_whole = _ngrams(ids, response_mask, n=2)
    found = grams[is_whole]
    return found.unique().numel() / found.numel() if found.numel() else float("nan")


def _ngrams(ids: Tensor, response_mask: Tensor, *, n: int) -> tuple[Tensor, Tensor]:
    """Return every n-gram as one integer (B, T − n + 1), and which of them lie within a response."""
    if ids.shape != response_mask.shape:
        raise ValueError(
            f"ids are {tuple(ids.shape)} and response_mask is {tuple(response_mask.shape)}; both are (B,T)"
        )
    if ids.numel() and int(ids.max()) >= 1 << _BITS_OF_ID:
        raise ValueError(
            f"id {int(ids.max())} is not below 2^{_BITS_OF_ID}, so that {n} of them have no number of their own"
        )
    ids, mask = ids.detach().cpu().long(), response_mask.cpu()
    width = max(ids.shape[1] - n + 1, 0)
    grams, is_whole = (
        torch.zeros(len(ids), width, dtype=torch.long),
        torch.ones(len(ids), width, dtype=torch.bool),
    )
    for offset in range(n):
        grams = (grams << _BITS_OF_ID) | ids[:, offset : offset + width]
        is_whole &= mask[:, offset : offset + width]
    return grams, is_whole
