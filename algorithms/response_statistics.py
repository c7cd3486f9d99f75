"""Statistics of several responses to one prompt: how often one of k is right, and how varied they are.

Each function gives one number a prompt, so that means over prompts have errors by `vantage.algorithms.uncertainty`. Everything
is computed in float64 on the CPU.
"""

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor


def pass_at_k(num_right: Tensor, *, num_samples: int, k: int) -> Tensor:
    """Return chance that at least one of k responses is right, by prompt: 1 − C(n − c, k)/C(n, k), unbiased.

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
    """Return distinct n-grams / n-grams in all responses to a prompt, by prompt (P,); NaN where there is no n-gram.

    distinct-n of Li et al., arXiv 1510.03055 §5.3 (there over a whole corpus), within each prompt: the diversity for
    one input of Kirk et al., arXiv 2310.06452 §4. It falls with the length and the number of the responses.

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
