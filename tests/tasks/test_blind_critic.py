"""EVPO leaves a critic that goes blind in mid-run out at once, and counts it again once it sees."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.test_presets_run import Case, job_of, preset
from vantage.ledger.journal import read
from vantage.tasks import policy_optimization
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates.gathering import Gathered, Source

BLIND_FROM, SEES_AGAIN_FROM, ITERATIONS = 2, 4, 6
THRESHOLD = -1.0
"""The tiny critic's explained variance is about 0, and that of noise in its place is far below 0."""


def returns_by_hand(gathered: Gathered) -> list[float]:
    """Return the sum of the rewards from each token on, of one response after the other; γ is 1."""
    returns = []
    rows = zip(gathered.rollout.rewards.tolist(), gathered.rollout.sequences.lengths.tolist(), strict=True)
    for rewards, length in rows:
        returns += [sum(rewards[token:length]) for token in range(length)]
    return returns


@pytest.mark.slow
def test_a_critic_that_goes_blind_is_left_out_in_the_same_iteration_and_comes_back(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switches = preset("evpo", critic_ev_threshold=THRESHOLD)
    rates = {"critic_learning_rate": 1e-5, "learning_rate": 1e-5, "validate_every": ITERATIONS}
    job = job_of(Case(switches, {"iterations": ITERATIONS, "batch_size": 16, **rates}), pipeline, tmp_path)
    gathered: list[Gathered] = []
    seeing: dict[str, torch.Tensor] = {}
    gather = policy_optimization.gather

    def with_noise(source: Source, *others: Any, **named: Any) -> Gathered:
        networks = source.networks
        assert networks.critic is not None
        if len(gathered) == BLIND_FROM:
            seeing.update({name: tensor.clone() for name, tensor in networks.critic.state_dict().items()})
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for weight in networks.critic.parameters():
                    weight.copy_(torch.randn(weight.shape, generator=generator))
        if len(gathered) == SEES_AGAIN_FROM:
            networks.critic.load_state_dict(seeing)
        gathered.append(gather(source, *others, **named))
        return gathered[-1]

    monkeypatch.setattr(policy_optimization, "gather", with_noise)
    with caplog.at_level(logging.INFO, logger="vantage.tasks.policy_optimization"):
        result = run_stage(job)

    # 1. The first rollout of the blind critic switches it off, and the first one after it sees again switches it on
    is_blind = [BLIND_FROM <= iteration < SEES_AGAIN_FROM for iteration in range(ITERATIONS)]
    explained = [each.estimates.explained_variance for each in gathered]
    assert [value is not None and value > THRESHOLD for value in explained] == [not each for each in is_blind]
    weights = [entry.metrics["critic_weight"] for entry in read(job.scratch / JOURNAL)]
    assert weights == [0.0 if each else 1.0 for each in is_blind]

    # 2. Without the critic, advantages are returns less their mean over tokens, and depend on no value
    for each, blind in zip(gathered, is_blind, strict=True):
        mask = each.rollout.sequences.response_mask
        found, returns = (
            each.estimates.advantages[mask].double(),
            torch.tensor(returns_by_hand(each), dtype=torch.float64),
        )
        assert torch.allclose(found, returns - returns.mean(), atol=1e-5) == blind

    # 3. The log reports it
    told = [record.getMessage() for record in caplog.records if "the critic" in record.getMessage()]
    assert [text.partition("the critic ")[2] for text in told] == [
        "is left out: advantages are returns less their mean",
        "counts again",
    ]
    assert result.metrics["critic_weight_mean"] == pytest.approx(4 / 6)
