"""Switches of the losses of 2025, and the rules by which they fit the others; each combination that makes no sense is refused."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Number, Positive, is_default, is_unset

if TYPE_CHECKING:
    from vantage.schemas.recipe.algorithm import Algorithm

TOKEN_ADVANTAGES = ("gae", "returns_to_go", "greedy_baseline")
"""Advantages that differ between the tokens of a response."""


class Losses(Frozen):
    """Switches that bound the ratio, hold the entropy, and place the KL in other ways than PPO does."""

    surrogate: Literal["clipped", "clipped_weight", "soft_gate", "geometric_mean"] = Field(
        "clipped", exclude_if=is_default("clipped")
    )
    """Bound of the ratio ρ. ``clipped``: −min(ρ·A, clip(ρ)·A). ``clipped_weight``: −sg[clip(ρ)]·A·log π, so that no token
    loses its gradient (CISPO, arXiv 2506.13585). ``soft_gate``: −4/τ·σ(τ·(ρ − 1))·A (SAPO, arXiv 2511.20347).
    ``geometric_mean``: −A·(Π clip(ρ))^(1/length), each token clipped on the side that its advantage asks for (GMPO, arXiv
    2507.20673)."""
    ratio_level: Literal["token", "sequence"] = Field("token", exclude_if=is_default("token"))
    """Level of the ratio that is bounded: each token's own, or the response's, as the geometric mean over its tokens (GSPO, arXiv
    2507.18071 eq. 7; its clip ranges are 3e-4 and 4e-4). Its gradient reaches every token (GSPO-token)."""
    soft_gate_positive: Positive = Field(1.0, exclude_if=is_default(1.0))
    """τ of ``soft_gate`` where A > 0; a larger τ closes the gate sooner (SAPO: 1)."""
    soft_gate_negative: Positive = Field(1.05, exclude_if=is_default(1.05))
    """τ of ``soft_gate`` where A ≤ 0 (SAPO: 1.05)."""

    covariance: Literal["none", "clip", "kl"] = Field("none", exclude_if=is_default("none"))
    """Treatment of the tokens that lower the entropy most: those of a large covariance
    (log π − mean log π)·(A − mean A) over the minibatch (arXiv 2505.22617). ``clip`` leaves some of them out of the gradient,
    ``kl`` adds |log ρ| of the largest to the loss. Either costs one more forward pass over each minibatch."""
    covariance_share: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] = Field(
        2e-4, exclude_if=is_default(2e-4)
    )
    """Share of the minibatch's tokens that is selected, rounded down, but one at least (2e-4; for ``kl`` also 2e-3)."""
    covariance_low: Number = Field(1.0, exclude_if=is_default(1.0))
    """Lower bound of the covariance of tokens that ``clip`` draws, in nats times units of the advantage."""
    covariance_high: Number = Field(5.0, exclude_if=is_default(5.0))
    """Upper bound of the covariance of tokens that ``clip`` draws."""
    covariance_kl_coef: Positive = Field(1.0, exclude_if=is_default(1.0))
    """Weight of |log ρ| of the tokens that ``kl`` selects, in loss per nat (the paper's β, 1)."""

    kl_loss_gradient: Literal["estimate", "unbiased"] = Field("estimate", exclude_if=is_default("estimate"))
    """Gradient of the KL in the loss. ``estimate`` differentiates the estimator alone. ``unbiased`` differentiates ρ too, by
    which it is weighted: with ``k1`` or ``k3`` it then is the gradient of each token's KL(π‖ref) (arXiv 2506.09477)."""
    kl_credit: Literal["response", "token"] = Field("response", exclude_if=is_default("response"))
    """Place of ``kl_coef`` in methods that compare a group. ``response``: the score that is compared is less the KL of the
    whole response. ``token``: scores alone are compared, and each token is charged the KL of itself and of later tokens
    (REINFORCE++ with a baseline, arXiv 2501.03262)."""

    entropy_target: Positive | None = Field(None, exclude_if=is_unset)
    """Entropy in nats per token below which the entropy bonus counts, and its coefficient rises; above it falls. The
    coefficient begins at ``entropy_coef`` (Skywork-OR1, arXiv 2505.22312: 0.2). None: ``entropy_coef`` is fixed."""
    entropy_step: Positive = Field(0.005, exclude_if=is_default(0.005))
    """Amount by which an iteration moves the entropy coefficient, in loss per nat (Skywork-OR1: 0.005)."""
    entropy_coef_max: Positive = Field(1.0, exclude_if=is_default(1.0))
    """Largest value of the entropy coefficient; the least is 0."""


def check_surrogate(switches: "Algorithm") -> None:
    """Raise ValueError if the surrogate contradicts another switch."""
    for name, usual in (("surrogate", "clipped"), ("ratio_level", "token")):
        value = getattr(switches, name)
        if value == usual:
            continue
        if not switches.importance_ratio:
            raise ValueError(
                f"{name}={value} bounds the ratio π/π_old, and importance_ratio=false has none; set importance_ratio: true, "
                f"or {name}: {usual}"
            )
        if switches.ratio_mask:
            raise ValueError(
                f"{name}={value} and ratio_mask both decide what an off-policy token weighs; set ratio_mask: false, or "
                f"{name}: {usual}"
            )
    if switches.surrogate != "geometric_mean":
        return
    if switches.ratio_level == "sequence":
        raise ValueError(
            "surrogate=geometric_mean takes the mean over the response itself, of ratios that are clipped before; "
            "set ratio_level: token"
        )
    if switches.advantage in TOKEN_ADVANTAGES or switches.kl_credit == "token":
        why = "kl_credit=token" if switches.kl_credit == "token" else f"advantage={switches.advantage}"
        raise ValueError(
            f"surrogate=geometric_mean has one ratio for a response, and {why} gives each token its own advantage; "
            "use advantage: group_normalised or another that compares whole responses, with kl_credit: response"
        )


def check_covariance(switches: "Algorithm") -> None:
    """Raise ValueError if the selection by covariance contradicts another switch."""
    if switches.covariance == "none":
        return
    for name, usual in (
        ("surrogate", "clipped"),
        ("ratio_level", "token"),
        ("ratio_mask", False),
        ("importance_ratio", True),
    ):
        value = getattr(switches, name)
        if value != usual:
            shown, wanted = str(value).lower(), str(usual).lower()
            raise ValueError(
                f"covariance={switches.covariance} selects tokens of the clipped surrogate, and {name}={shown} is another loss; "
                f"set {name}: {wanted}, or covariance: none"
            )
    if switches.covariance == "clip" and switches.covariance_low >= switches.covariance_high:
        raise ValueError(
            f"covariance_low={switches.covariance_low:g} is not below covariance_high={switches.covariance_high:g}, so that no "
            "token lies between; lower it"
        )


def check_kl_gradient(switches: "Algorithm") -> None:
    """Raise ValueError if the KL in the loss has no such gradient."""
    kind = switches.kl_loss_kind
    if switches.kl_loss_coef and switches.kl_loss_gradient == "unbiased" and kind not in ("k1", "k3"):
        raise ValueError(
            f"kl_loss_gradient=unbiased needs an estimator whose expectation is the KL, and kl_loss_kind={kind} is "
            f"{'exact already' if kind == 'full' else 'biased'}; use kl_loss_kind: k3, or kl_loss_gradient: estimate"
        )


def check_entropy(switches: "Algorithm") -> None:
    """Raise ValueError if the entropy coefficient begins above its largest value."""
    if switches.entropy_target is not None and switches.entropy_coef > switches.entropy_coef_max:
        raise ValueError(
            f"entropy_coef={switches.entropy_coef:g} is where the coefficient begins, and is above entropy_coef_max="
            f"{switches.entropy_coef_max:g}; lower it"
        )
