"""Write out diagnoses of critics by hand, for tests."""

from typing import Any

from vantage.schemas.records.critic_diagnosis import (
    Calibration,
    CriticDiagnosis,
    DiagnosedAdvantages,
    DiagnosedPrompt,
    DiagnosedSlice,
    Estimated,
    Ordering,
    PretrainedCritic,
)


def estimated(value: float | None, error: float | None = 0.01, *, n: int = 100) -> Estimated:
    return Estimated(value=value, n=n, rows=4 * n, standard_error=error)


def of_slice(
    label: str, explained: float | None, *, error: float = 0.01, tokens: int = 100
) -> DiagnosedSlice:
    bias = estimated(0.0)
    return DiagnosedSlice(
        label=label, explained_variance=estimated(explained, error), bias=bias, tokens=tokens
    )


def diagnosis(**changes: Any) -> CriticDiagnosis:
    """Return the diagnosis of a good critic, but for the changes."""
    good: dict[str, Any] = {
        "prompts": 100,
        "responses": 400,
        "tokens": 1000,
        "return_mean": 0.5,
        "return_variance": 4.0,
        "explained_variance": estimated(0.6),
        "between_prompts": estimated(0.7),
        "within_prompts": estimated(0.5),
        "bias": estimated(0.0),
        "by_tenth": tuple(of_slice(str(tenth), 0.05 * tenth) for tenth in range(1, 11)),
        "by_tokens_left": (of_slice("1", 0.9), of_slice("2-3", 0.8), of_slice("64-127", 0.2)),
        "by_length": (of_slice("32-63", 0.5, tokens=600), of_slice("64-127", 0.3, tokens=400)),
        "by_difficulty": (of_slice("hardest", 0.3), of_slice("easiest", 0.4)),
        "calibration": (
            Calibration(value=-1.0, returned=estimated(-1.1), error=estimated(0.1), tokens=500),
            Calibration(value=1.0, returned=estimated(1.2), error=estimated(-0.2), tokens=500),
        ),
        "calibration_error": 0.15,
        "orderings": (
            Ordering(at=0.25, correlation=estimated(0.1)),
            Ordering(at=0.5, correlation=estimated(0.4)),
        ),
        "advantages": DiagnosedAdvantages(
            critic=estimated(1.6),
            batch_mean=estimated(4.0),
            others_mean=estimated(2.0),
            ratio=estimated(0.4),
        ),
        "worst_prompts": (
            DiagnosedPrompt(
                prompt="3 a+4? <b>", responses=4, value=1.0, returned=-2.0, squared_error=9.0, share=0.25
            ),
        ),
        "iterations": 10,
        "best_iteration": 10,
    }
    return CriticDiagnosis(**{**good, **changes})


def critic(**changes: Any) -> PretrainedCritic:
    """Return the critic of a stage called value."""
    return PretrainedCritic(step="value", diagnosis=diagnosis(**changes))
