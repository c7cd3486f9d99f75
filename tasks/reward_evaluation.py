"""Evaluate a reward model on test pairs: its accuracy, its weak spots, and the calibration of its probabilities."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from vantage.algorithms.calibration import brier_scores, calibration_gaps, reliability
from vantage.algorithms.preference_loss import measure_pairs
from vantage.algorithms.uncertainty import Estimate
from vantage.models.heads import ScalarModel, load_scalar, scores
from vantage.schemas.metric_names import LENGTH_GROUPS
from vantage.schemas.recipe.evaluations import RewardEvaluation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.uncertainty import interval_of
from vantage.tasks.data.encoding_counts import comparison_metrics
from vantage.tasks.data.examples import Completions, codec_of, read_completions
from vantage.tasks.data.splits import TEST
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.measured import defined, mean_among, uncertainty_of, values_of
from vantage.tasks.training.networks import placed
from vantage.tasks.training.optimization import training_device
from vantage.tasks.training.passes import laid_out, passes
from vantage.tasks.training.resampling import bootstrapped_size
from vantage.tasks.training.seeds import derive_seed, stage_seed

SIDES = ("chosen", "rejected")
ENOUGH_PROMPTS = 10
"""Fewest prompts of a subgroup that can be reported as the worst."""
CALIBRATION_FILE = "calibration.json"
SUBGROUPS_FILE = "subgroups.json"
_CONFIDENCE = 0.95
"""Confidence of the intervals in the file of subgroups."""


def run(job: StageJob[RewardEvaluation]) -> StageResult:
    """Score the test pairs; the artifact contains the tables of calibration and of subgroups."""
    # 1. Compute the margin of every test pair: chosen score − rejected score
    codec = codec_of(job, "reward_model")
    files, device = job.model("reward_model"), training_device()
    reward = placed(
        lambda: load_scalar(files, role="reward", training="nothing"),
        files,
        device,
        precision=job.work.arithmetic,
    )
    pairs = read_completions(job.inputs["data"], TEST, SIDES, codec)
    both = pair_scores(reward, pairs, limits=job.work.pass_limits.or_rows(job.work.batch_size))
    margins, clusters = both[0].double() - both[1].double(), pairs.clusters()

    # 2. Compute accuracy, calibration, and accuracy by length
    measured = measure_pairs(*both)
    gaps = gaps_of_outcomes(margins)
    means = {
        "pair_accuracy": measured.correct,
        "score_gap": measured.score_gap,
        "preference_loss": measured.loss,
        "brier_score": brier_scores(margins),
    }
    everything = torch.ones(len(margins), dtype=torch.bool)
    estimates = {name: mean_among(each, clusters, everything) for name, each in means.items()}
    estimates["expected_calibration_error"] = bootstrapped_size(
        gaps, clusters, seed=derive_seed(stage_seed(job), "resamples")
    )
    correct = measured.correct.double()
    groups = length_groups(length_differences(pairs))
    estimates |= {f"pair_accuracy_{group}": mean_among(correct, clusters, groups[group]) for group in groups}

    # 3. Compute accuracy by the data's own subgroups
    subgroups = accuracy_by_subgroup(pairs, correct, clusters)
    numbers = {"num_subgroups": len(subgroups), "worst_subgroup_accuracy": worst_accuracy(subgroups)}

    table = [{name: defined(value) for name, value in asdict(each).items()} for each in reliability(margins)]
    _write(job, CALIBRATION_FILE, table)
    _write(job, SUBGROUPS_FILE, subgroup_table(subgroups))
    return StageResult(
        metrics={**values_of(estimates), **numbers, **comparison_metrics(job, "data", [pairs])},
        uncertainty=uncertainty_of(estimates),
    )


@torch.no_grad()
def pair_scores(reward: ScalarModel, pairs: Completions, *, limits: PassLimits) -> Tensor:
    """Return scores of the chosen and of the rejected responses, (2,N) on the CPU."""
    both = torch.zeros(len(pairs), 2)
    for part in passes(pairs.lengths(), limits, sequences=len(SIDES), is_divided=True):
        progress.phase("scoring", part.done, len(pairs))
        batch = laid_out(pairs.batch(part.rows).to(reward.device), limits)
        part.put(torch.stack(scores(reward, batch).chunk(2), dim=1), into=both)
    return ranks.total(both).T


def length_differences(pairs: Completions) -> Tensor:
    """Return the tokens of each chosen response less those of the rejected one, (N,) integers."""
    lengths = [[len(ids) for ids in pairs.response_ids[side]] for side in SIDES]
    return torch.tensor(lengths[0]) - torch.tensor(lengths[1])


def length_groups(differences: Tensor) -> dict[str, Tensor]:
    """Return name in ``LENGTH_GROUPS`` → pairs in the group, (N,) booleans.

    The groups are quarters, cut at the 25th, 50th and 75th percentile; a difference that equals a cut is below it.
    """
    cuts = torch.quantile(differences.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    quarter = torch.bucketize(differences.double(), cuts)
    members = (differences > 0, differences < 0, *(quarter == place for place in range(4)))
    return dict(zip(LENGTH_GROUPS, members, strict=True))


def accuracy_by_subgroup(pairs: Completions, correct: Tensor, clusters: Tensor) -> dict[str, Estimate]:
    """Return subgroup → accuracy of its pairs, by name; empty without the column. Pairs without a subgroup are left out."""
    names = pairs.subgroups or []
    found = sorted({name for name in names if name is not None})
    return {
        name: mean_among(correct, clusters, torch.tensor([each == name for each in names])) for name in found
    }


def worst_accuracy(subgroups: Mapping[str, Estimate]) -> float | None:
    """Return the lowest accuracy of the subgroups with ``ENOUGH_PROMPTS``; None: none has as many."""
    large = [each.value for each in subgroups.values() if each.num_clusters >= ENOUGH_PROMPTS]
    return min(large, default=None)


def gaps_of_outcomes(margins: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from weights (R,2N) to calibration gaps: weights of the pairs, then of each with the opposite outcome."""
    return partial(calibration_gaps, torch.cat((margins, -margins)))


def subgroup_table(subgroups: dict[str, Estimate]) -> list[dict[str, object]]:
    """Return each subgroup with its pairs, prompts, accuracy and Wilson's interval."""
    uncertainty = uncertainty_of(subgroups)
    return [
        {
            "subgroup": name,
            "pairs": each.num_rows,
            "prompts": each.num_clusters,
            "accuracy": each.value,
            "interval": interval_of("pair_accuracy", each.value, uncertainty[name], confidence=_CONFIDENCE),
        }
        for name, each in subgroups.items()
    ]


def _write(job: StageJob[RewardEvaluation], name: str, table: object) -> None:
    text = json.dumps(table, ensure_ascii=False, indent=1) + "\n"
    (job.output / name).write_text(text, encoding="utf-8")
