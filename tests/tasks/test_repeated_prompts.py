"""In held-out preferences the rows of one prompt are one cluster in every standard error."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.test_dpo import WORK, job_in, models_of
from vantage.algorithms.uncertainty import Estimate
from vantage.models.heads import reward_with_language_head, scores
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks import dpo
from vantage.tasks.data.examples import Completions, Rankings, codec_of, read_completions, read_rankings
from vantage.tasks.data.rows import write_rows
from vantage.tasks.dpo import pair_logprobs
from vantage.tasks.reward_model import measure_pairs, measure_preferences

CPU = torch.device("cpu")
PROMPTS = ["3 a+2?", "4 a-1?", "3 a+2?", "5 a+1?", "4 a-1?", "3 a+2?"]
"""Three rows of the first prompt, two of the second, one of the third, in no order."""
OF_PROMPT = [0, 1, 0, 2, 1, 0]
PAIRS = [
    {"prompt": prompt, "chosen": f"a:{n}{n + 1} #{n}", "rejected": f"a:{n}{7 - n}{n} #{n + 2}"}
    for n, prompt in enumerate(PROMPTS)
]
"""Pairs of unequal lengths, so that their gaps differ."""


def error_over_prompts(values: Sequence[float], of_prompt: Sequence[int]) -> float:
    """Return √(n/(n − 1) · Σ_c (Σ_{i in c} (x_i − x̄))²)/N: what a mean's error is where rows come in n clusters."""
    mean, n = sum(values) / len(values), len(set(of_prompt))
    residuals = dict.fromkeys(of_prompt, 0.0)
    for value, prompt in zip(values, of_prompt, strict=True):
        residuals[prompt] += value - mean
    return float((n / (n - 1) * sum(each**2 for each in residuals.values())) ** 0.5 / len(values))


def assert_clustered(found: Estimate, values: Sequence[float], of_prompt: Sequence[int]) -> None:
    """Assert value and error of a mean over rows; rows as clusters must give another error."""
    assert found.value == pytest.approx(sum(values) / len(values), rel=1e-3, abs=1e-6)
    assert found.standard_error == pytest.approx(error_over_prompts(values, of_prompt), rel=2e-3, abs=1e-6)
    assert found.standard_error != pytest.approx(error_over_prompts(values, range(len(values))), rel=2e-2)
    assert (found.num_clusters, found.num_rows) == (len(set(of_prompt)), len(values))


@pytest.fixture(scope="module")
def pairs(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Completions]:
    folder = tmp_path_factory.mktemp("pairs")
    write_rows(folder, "test", PAIRS)
    job = job_in(pipeline, tmp_path_factory.mktemp("job"))
    return job, read_completions(folder, "test", dpo.SIDES, codec_of(job, "init"))


def test_of_a_reward_model(pairs: tuple[Any, Completions]) -> None:
    """A reward model's errors count the rows of one prompt as one cluster."""
    job, data = pairs
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    found = measure_pairs(reward, data, limits=PassLimits(4))
    with torch.no_grad():
        gaps = [
            float(torch.sub(*scores(reward, data.batch([row])).double().chunk(2)))
            for row in range(len(PAIRS))
        ]
    assert_clustered(found["score_gap"], gaps, OF_PROMPT)
    assert found["pair_accuracy"].num_clusters == found["preference_loss"].num_clusters == 3


def test_of_direct_preference_optimisation(pairs: tuple[Any, Completions]) -> None:
    """The errors of a ``dpo`` stage count the rows of one prompt as one cluster."""
    job, data = pairs
    models = models_of(job, temperature=0.7)
    found = dpo.measure_pairs(models, data, WORK)
    gaps = []
    with torch.no_grad():
        for row in range(len(PAIRS)):
            each = pair_logprobs(models, data.batch([row]), precision="float32")
            gaps.append(
                WORK.beta * float((each.chosen - each.ref_chosen) - (each.rejected - each.ref_rejected))
            )
    assert_clustered(found["reward_gap"], gaps, OF_PROMPT)
    assert found["pair_accuracy"].num_clusters == found["preference_loss"].num_clusters == 3


def test_of_rankings(pairs: tuple[Any, Completions], tmp_path: Path) -> None:
    """Rows rank two or three responses. The pairs of all rows of a prompt are one cluster, not those of one row."""
    job, _ = pairs
    ranked = [
        {"prompt": row["prompt"], "responses": [row["chosen"], row["rejected"], "a:1"][: 2 + n % 2], "ranks": [0, 1, 2][: 2 + n % 2]}
        for n, row in enumerate(PAIRS)
    ]  # fmt: skip
    write_rows(tmp_path, "test", ranked)
    data: Rankings = read_rankings(tmp_path, "test", codec_of(job, "init"))
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    found = measure_preferences(reward, data, limits=PassLimits(4))
    gaps, of_prompt = [], []
    with torch.no_grad():
        for row, prompt in enumerate(OF_PROMPT):
            of_row = scores(reward, data.batch([row]).sequences).double().tolist()
            for better in range(len(of_row)):
                for worse in range(better + 1, len(of_row)):
                    gaps.append(of_row[better] - of_row[worse])
                    of_prompt.append(prompt)
    assert len(gaps) == 3 * 1 + 3 * 3
    assert_clustered(found["score_gap"], gaps, of_prompt)
    assert found["pair_accuracy"].num_clusters == found["preference_loss"].num_clusters == 3
