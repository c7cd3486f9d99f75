"""Diagnose a critic on held-out responses: as a file of its artifact, and as metrics for gates."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vantage.algorithms.critic_quality import (
    SquaredAdvantages,
    calibration,
    calibration_error,
    prompt_errors,
    prompt_parts,
    rank_correlation,
    squared_advantages,
)
from vantage.algorithms.critic_slices import Slice, by_difficulty, by_length, by_part, by_tokens_left
from vantage.algorithms.diagnostics import value_diagnostics
from vantage.algorithms.uncertainty import Estimate, clustered_explained_variance, clustered_ratio
from vantage.schemas.kinds import KINDS
from vantage.schemas.records.critic_diagnosis import (
    DIAGNOSIS_FILE,
    PROMPT_CHARACTERS,
    WORST_PROMPTS,
    Calibration,
    CriticDiagnosis,
    DiagnosedAdvantages,
    DiagnosedPrompt,
    DiagnosedSlice,
    Estimated,
    Ordering,
)
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.storage.durable_files import write_file
from vantage.tasks.training.measured import clusters_of, defined

HALF_WAY = 0.5
_PARTS_OF_THE_WAY = (0.25, HALF_WAY, 0.75, 1.0)


def diagnose_critic(
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    prompts: Sequence[str],
    *,
    iterations: int,
    best_iteration: int,
) -> CriticDiagnosis:
    """Return the whole diagnosis; `values`, `returns`, `response_mask` (B,T), Monte-Carlo returns; `prompts` of the rows.

    `iterations` is the largest number of iterations that the critic could train, `best_iteration` the one that was
    kept.
    """
    clusters = clusters_of(prompts)
    batch = (values, returns, response_mask, clusters)
    whole = value_diagnostics(values, returns, response_mask, num_positions=1)
    parts, curve = prompt_parts(*batch), calibration(*batch)
    error = (values.double() - returns.double()).masked_fill(~response_mask, 0.0).sum(dim=1)
    orderings = {at: rank_correlation(*batch, at=at) for at in _PARTS_OF_THE_WAY}
    return CriticDiagnosis(
        prompts=len(set(prompts)),
        responses=len(prompts),
        tokens=whole.num_tokens,
        return_mean=returns[response_mask].double().mean().item(),
        return_variance=whole.return_variance,
        explained_variance=_estimated(clustered_explained_variance(*batch)),
        between_prompts=_estimated(parts.between),
        within_prompts=_estimated(parts.within) if parts.within else None,
        bias=_estimated(clustered_ratio(error, response_mask.sum(dim=1), clusters)),
        by_tenth=_diagnosed(by_part(*batch)),
        by_tokens_left=_diagnosed(by_tokens_left(*batch)),
        by_length=_diagnosed(by_length(*batch)),
        by_difficulty=_diagnosed(by_difficulty(*batch)),
        calibration=tuple(
            Calibration(
                value=each.value,
                returned=_estimated(each.returned),
                error=_estimated(each.error),
                tokens=each.num_tokens,
            )
            for each in curve
        ),
        calibration_error=calibration_error(curve),
        orderings=tuple(
            Ordering(at=at, correlation=_estimated(found)) for at, found in orderings.items() if found
        ),
        advantages=_advantages(squared_advantages(*batch)),
        worst_prompts=_worst_prompts(values, returns, response_mask, prompts),
        iterations=iterations,
        best_iteration=best_iteration,
    )


def write_diagnosis(folder: Path, diagnosis: CriticDiagnosis) -> None:
    """Write the diagnosis into a critic's folder."""
    write_file(folder / DIAGNOSIS_FILE, diagnosis.model_dump_json(indent=1).encode() + b"\n")


def diagnosis_estimates(diagnosis: CriticDiagnosis) -> dict[str, Estimated]:
    """Return metric → measurement, for the metrics that are estimates and have something to measure."""
    found = {
        f"explained_variance_{name}{each.label.replace('-', '_').rstrip('+')}": each.explained_variance
        for name, slices in (
            ("tenth_", diagnosis.by_tenth),
            ("tokens_left_", diagnosis.by_tokens_left),
            ("length_", diagnosis.by_length),
            ("", diagnosis.by_difficulty),
        )
        for each in slices
    }
    maybe = {
        "explained_variance": diagnosis.explained_variance,
        "value_bias": diagnosis.bias,
        "value_mse": diagnosis.advantages.critic,
        "explained_variance_between_prompts": diagnosis.between_prompts,
        "explained_variance_within_prompts": diagnosis.within_prompts,
        "rank_correlation": next(
            (each.correlation for each in diagnosis.orderings if each.at == HALF_WAY), None
        ),
        "squared_advantage_ratio": diagnosis.advantages.ratio,
        "others_mean_mse": diagnosis.advantages.others_mean,
    }
    return found | {name: each for name, each in maybe.items() if each is not None}


def diagnosis_metrics(diagnosis: CriticDiagnosis) -> dict[str, float | None]:
    """Return the diagnosis under the names that gates use; None if there was nothing to measure."""
    everything = dict.fromkeys(KINDS["value_pretraining"].estimates)
    measured = {name: each.value for name, each in diagnosis_estimates(diagnosis).items()}
    return {**everything, **measured, "calibration_error": diagnosis.calibration_error}


def uncertainty_of_diagnosis(diagnosis: CriticDiagnosis) -> dict[str, Uncertainty]:
    """Return metric → uncertainty, if there was something to measure."""
    return {
        name: Uncertainty(n=each.n, rows=each.rows, standard_error=each.standard_error)
        for name, each in diagnosis_estimates(diagnosis).items()
    }


def _estimated(estimate: Estimate) -> Estimated:
    return Estimated(
        value=defined(estimate.value),
        n=estimate.num_clusters,
        rows=estimate.num_rows,
        standard_error=defined(estimate.standard_error),
    )


def _diagnosed(slices: Sequence[Slice]) -> tuple[DiagnosedSlice, ...]:
    return tuple(
        DiagnosedSlice(
            label=each.label,
            explained_variance=_estimated(each.explained_variance),
            bias=_estimated(each.bias),
            tokens=each.num_tokens,
        )
        for each in slices
    )


def _advantages(squares: SquaredAdvantages) -> DiagnosedAdvantages:
    return DiagnosedAdvantages(
        critic=_estimated(squares.critic),
        batch_mean=_estimated(squares.batch_mean),
        others_mean=_estimated(squares.others_mean) if squares.others_mean else None,
        ratio=_estimated(squares.ratio) if squares.ratio else None,
    )


def _worst_prompts(
    values: Tensor, returns: Tensor, response_mask: Tensor, prompts: Sequence[str]
) -> tuple[DiagnosedPrompt, ...]:
    texts = list(dict.fromkeys(prompts))  # in the order in which `clusters_of` numbers them
    errors = prompt_errors(values, returns, response_mask, clusters_of(prompts))
    found = [
        DiagnosedPrompt(
            prompt=texts[each.prompt][:PROMPT_CHARACTERS],
            responses=each.num_responses,
            value=each.value,
            returned=each.returned,
            squared_error=each.squared_error,
            share=each.share,
        )
        for each in errors
        if each.squared_error > 0
    ]
    return tuple(sorted(found, key=lambda each: (-each.share, each.prompt))[:WORST_PROMPTS])
