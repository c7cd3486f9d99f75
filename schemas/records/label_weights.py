"""The balance of labelled responses by their weights, and the message about an imbalance."""

LEAST, MOST = 1.0, 4 / 3
"""(λ_D · n_D) / (λ_U · n_U) as Hugging Face's TRL recommends it by the paper of KTO, arXiv 2402.01306."""
TOLERANCE = 0.05


def imbalance(ratio: float) -> str | None:
    """Return what is wrong with (desirable_weight · desirable rows) / (undesirable_weight · undesirable rows); None: nothing."""
    if LEAST - TOLERANCE <= ratio <= MOST + TOLERANCE:
        return None
    remedy = (
        "raise desirable_weight, or lower undesirable_weight"
        if ratio < LEAST
        else "raise undesirable_weight, or lower desirable_weight"
    )
    return (
        f"desirable_weight × desirable rows is {ratio:.2f} times undesirable_weight × undesirable rows, and 1 to 1.33 is "
        f"recommended (TRL, by arXiv 2402.01306); {remedy}"
    )
