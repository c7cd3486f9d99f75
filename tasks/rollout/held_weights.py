"""Prove that an engine holds the weights of the policy: compare the log-probabilities that both give to a few fixed
rows."""

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

MAX_GAP: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest mean |Δ|, in nats per token, that rounding may explain. Measured on a CPU: 2e-6 to 2e-5 in float32; in
bfloat16 0.03 for small random models and 0.11 for SmolLM2, whose logits are larger
(docs/log/models_and_sampling.md)."""

MOVED: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 0.05}
"""Mean |Δ| between the log-probabilities of the policy before and after an update. If it is larger, an engine that has taken the update
must compute other bits than before."""

NEARER: dict[Precision, float] = {"float32": 1e-5, "bfloat16": 0.25}
"""The same mean |Δ|. If it is larger, which is more than the rounding of both, an engine that has taken the update must be nearer to the
policy after it than to the policy before it."""

EFFECT: dict[Precision, float] = {"float32": 2e-5, "bfloat16": 0.25}
"""Least mean |Δ| between the policy with and without its adapters for a comparison of their effects."""

MAX_SHARE_GAP = 0.25
"""Most |share − 1| of an adapter's effect in an engine. A factor that is wrong by two gives 0.5 or 2, and no adapter at all gives 0."""


NOTHING_SAMPLED = "nothing was sampled"


class WeightsDiffer(ValueError):
    """The engine does not hold the weights of the policy."""


@dataclass(frozen=True)
class Proof:
    """Distance of the engine from the policy, in nats per token."""

    gap: float
    """Mean |Δ| between the two."""
    logprobs: Tensor
    """(ROWS, TOKENS − 1), float64: the policy's log-probabilities."""

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
        FloatingPointError: a log-probability is not a number.
    """
    sequences = collate([row[:1] for row in rows], [row[1:] for row in rows], pad_token_id=pad_token_id)
    with autocast(precision, policy.device):
        found = policy.logprobs(sequences.to(policy.device), temperature=1.0).logprobs.double().cpu()
    if not found.isfinite().all():
        raise FloatingPointError("the model's logits are not finite; go back to weights that are")
    return found


def check_held(
    engine: Tensor,
    policy: Tensor,
    before: Tensor | None,
    *,
    precision: Precision,
    earlier: tuple[Tensor, Tensor] | None = None,
    base: Tensor | None = None,
    outcome: str = NOTHING_SAMPLED,
) -> Proof:
    """Return how far the engine's log-probabilities of the fixed rows are from the policy's.

    Args:
        before: the policy's log-probabilities before its last update; None: there was none.
        earlier: the policy's and the engine's log-probabilities at this engine's last proof; None: there was none.
        base: the policy's log-probabilities without its adapters; None: it has none.
        outcome: part of the error's message about responses.

    Raises:
        WeightsDiffer: the gap is more than rounding, the engine computes the same as before the update or is nearer to
            the policy before it, or it applies the policy's adapters in another way than the policy does.
    """
    gap, bound = _mean_gap(engine, policy), MAX_GAP[precision]
    if base is not None and gap > bound and _mean_gap(engine, base) <= bound:
        raise WeightsDiffer(
            f"vLLM answers without the policy's adapters: on fixed rows it is {_mean_gap(engine, base):.3g} nats per token from the base "
            f"and {gap:.3g} from the policy; {outcome}; {_remedy(precision)}"
        )
    if not gap <= bound:  # NaN is refused too
        raise WeightsDiffer(
            f"vLLM does not hold the policy's weights: on fixed rows its mean log-probability is {engine.mean():.6f} nats and the "
            f"policy's {policy.mean():.6f}; mean |Δ|={gap:.3g} is above {bound:g}, all that rounding explains under "
            f"precision={precision}; {outcome}; {_remedy(precision)}"
        )
    if earlier is not None and torch.equal(engine, earlier[1]):
        moved = _mean_gap(policy, earlier[0])
        if moved > MOVED[precision]:
            raise WeightsDiffer(
                f"vLLM holds the weights from before the last update: on fixed rows the policy has moved by {moved:.3g} nats per token, and "
                f"vLLM computes the same bits as before; {outcome}; {_remedy(precision)}"
            )
    if before is not None and _mean_gap(policy, before) > NEARER[precision]:
        to_before = _mean_gap(engine, before)
        is_base = base is not None and _mean_gap(engine, base) < to_before  # another message names that
        if to_before < gap and not is_base:
            raise WeightsDiffer(
                f"vLLM holds the weights from before the last update: on fixed rows it is {to_before:.3g} nats per token from the "
                f"policy before the update and {gap:.3g} from the policy now; {outcome}; {_remedy(precision)}"
            )
    if base is not None and _mean_gap(policy, base) > EFFECT[precision]:
        share = _share_of_effect(engine, policy, base)
        if not abs(share - 1) <= MAX_SHARE_GAP:
            raise WeightsDiffer(
                f"vLLM applies the policy's adapters otherwise than the policy does: on fixed rows their effect there is {share:.2f} times "
                f"that in the policy (0: they did not arrive; another number: another scaling, or an old adapter); nothing was sampled; "
                f"{_remedy(precision)}"
            )
    return Proof(gap, policy)


def _share_of_effect(engine: Tensor, policy: Tensor, base: Tensor) -> float:
    """Return ⟨engine − base, policy − base⟩ / |policy − base|²: 1 if the adapters have the same effect in engine and
    policy.

    Rounding moves single log-probabilities, but hardly this sum over all of them. So it finds an effect of the wrong
    size far below the bound of the gap.
    """
    effect = policy - base
    return ((engine - base) * effect).sum().item() / effect.square().sum().item()


def _mean_gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


def _remedy(precision: Precision) -> str:
    more = "" if precision == "float32" else "precision: float32, "
    return f"run the same command again; if the error comes back, use {more}another version of vllm, or rollout.engine: loop"
