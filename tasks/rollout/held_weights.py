"""The proof that an engine holds the weights of the policy: both read the same few fixed rows, and their log-probabilities are compared."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.models.policy import PolicyModel
from vantage.models.sequences import collate
from vantage.tasks.training.optimization import Precision, autocast

ROWS, TOKENS = 4, 16
"""Fixed rows, and tokens of each."""

DIGITS = 12
"""Hexadecimal digits of a digest: 48 bits, which a float64 holds exactly."""

MAX_GAP: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats per token of mean |Δ| that rounding may explain. Measured on a CPU: 2e-6 in float32, 0.03 in bfloat16 (docs/log/models_and_sampling.md)."""

MOVED: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 0.05}
"""Least mean |Δ| between the policy and itself before its update for the second rule: an engine with the new weights is then nearer
to the new policy."""


class WeightsDiffer(ValueError):
    """The engine does not hold the weights of the policy."""


@dataclass(frozen=True)
class Proof:
    """Distance of the engine from the policy, in nats per token."""

    gap: float
    """Mean |Δ| between the two."""
    logprobs: Tensor
    """(ROWS, TOKENS − 1), float64: the policy's own."""

    @property
    def digest(self) -> str:
        """Return the digest of the policy's weights; see ``digest_of``."""
        return digest_of(self.logprobs)


def digest_of(logprobs: Tensor) -> str:
    """Return the first digits of the sha256 of log-probabilities of the fixed rows, which name the weights on one machine."""
    return hashlib.sha256(logprobs.contiguous().numpy().tobytes()).hexdigest()[:DIGITS]


def fixed_rows(vocab_size: int, *, most: int) -> list[list[int]]:
    """Return rows of ids that are the same in every call for one vocabulary, of at most ``most`` tokens."""
    drawn = torch.Generator().manual_seed(vocab_size)
    return torch.randint(vocab_size, (ROWS, min(TOKENS, most)), generator=drawn).tolist()


@torch.no_grad()
def logprobs_of_policy(
    policy: PolicyModel, rows: Sequence[list[int]], *, precision: Precision, pad_token_id: int
) -> Tensor:
    """Return the policy's log-probability of each id but the first, at temperature 1, float64 on the CPU.

    Raises:
        FloatingPointError: they are not numbers.
    """
    sequences = collate([row[:1] for row in rows], [row[1:] for row in rows], pad_token_id=pad_token_id)
    with autocast(precision, policy.device):
        found = policy.logprobs(sequences.to(policy.device), temperature=1.0).logprobs.double().cpu()
    if not found.isfinite().all():
        raise FloatingPointError("the model's logits are not finite; go back to weights that are")
    return found


def check_held(engine: Tensor, policy: Tensor, before: Tensor | None, *, precision: Precision) -> Proof:
    """Return how far the engine's log-probabilities of the fixed rows are from the policy's.

    Args:
        before: the policy's own at the last proof; None: there was none.

    Raises:
        WeightsDiffer: the gap is more than rounding, or the engine is nearer to the policy before its update.
    """
    gap, bound = _mean_gap(engine, policy), MAX_GAP[precision]
    if not gap <= bound:  # NaN is refused too
        raise WeightsDiffer(
            f"vLLM does not hold the policy's weights: on fixed rows its mean log-probability is {engine.mean():.6f} nats and the "
            f"policy's {policy.mean():.6f}; mean |Δ|={gap:.3g} is above {bound:g}, all that rounding explains under "
            f"precision={precision}; nothing was sampled; {_remedy(precision)}"
        )
    if before is not None and _mean_gap(policy, before) > MOVED[precision]:
        to_before = _mean_gap(engine, before)
        if to_before < gap:
            raise WeightsDiffer(
                f"vLLM holds the weights from before the last update: on fixed rows it is {to_before:.3g} nats per token from the "
                f"policy before the update and {gap:.3g} from the policy now; nothing was sampled; {_remedy(precision)}"
            )
    return Proof(gap, policy)


def _mean_gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


def _remedy(precision: Precision) -> str:
    more = "" if precision == "float32" else "precision: float32, "
    return f"run the same command again; if the error comes back, use {more}another version of vllm, or rollout.engine: loop"
