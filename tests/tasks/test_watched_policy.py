"""A watch beside a policy stage measures, keeps the right policy, and acts on a fall."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.kills import killed_in
from vantage.algorithms import divergence_of_judges
from vantage.algorithms.divergence_of_judges import Change, change_of, deviations_lost, share_lost
from vantage.algorithms.uncertainty import Estimate
from vantage.ledger.journal import read
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.recipe.watch import Keep, Watch
from vantage.tasks.rollout import watching
from vantage.tasks.rollout.judge_agreement import agreement_with_interval, disagreement_notice
from vantage.tasks.rollout.rollouts import Scored
from vantage.tasks.rollout.watching import Watching
from vantage.tasks.stages import run_stage
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import JOURNAL, PROGRESS
from vantage.tasks.training.stage_state import WatchedSoFar

Contents = Callable[[Path], dict[str, bytes]]
ARITHMETIC = Judge(verifier="arithmetic")
WATCHED = {"watch": Watch(judge=ARITHMETIC, every=1)}
JOURNALLED = ("validation_watch_score", "watch_change", "watch_falls", "watch_worse", "watch_lost")


def scored(prompts: list[str], rewards: list[float]) -> Scored:
    """Return responses as far as a watch looks at them."""
    sampled = SimpleNamespace(prompts=prompts)
    return cast(Scored, SimpleNamespace(sampled=sampled, scores=SimpleNamespace(total=torch.tensor(rewards))))


def falls_by_hand(
    now: list[float], before: list[float], sign: int, *, errors: float = 1.959963984540054
) -> bool:
    """Return whether the mean difference of independent prompts lies beyond 0 by more than so many standard errors, in plain Python."""
    differences = [sign * (a - b) for a, b in zip(now, before, strict=True)]
    mean = sum(differences) / len(differences)
    variance = sum((each - mean) ** 2 for each in differences) / (len(differences) - 1)
    return mean - errors * (variance / len(differences)) ** 0.5 > 0


@pytest.mark.parametrize("seed", range(4))
def test_falls_are_counted_against_the_measurement_that_the_judge_liked_best(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompts = [str(k) for k in range(12)]
    seen, best, falls, worse = WatchedSoFar(), None, 0, 0
    for step in range(10):
        rewards = (torch.rand(12, generator=generator) + 0.12 * step).tolist()
        judged = (torch.rand(12, generator=generator) - 0.12 * max(step - 3, 0)).tolist()
        seen, metrics = Watching(lambda _, judged=judged: torch.tensor(judged, dtype=torch.float64)).look(  # type: ignore[misc]
            scored(prompts, rewards), seen
        )
        # rounded as the reward's single precision rounds them
        rewards = torch.tensor(rewards).double().tolist()
        assert metrics["validation_watch_score"] == pytest.approx(sum(judged) / 12)
        if best is None or sum(judged) > sum(best[1]):
            best, falls, worse = (rewards, judged), 0, 0
        else:
            worse = worse + 1 if falls_by_hand(judged, best[1], -1, errors=3.2905267314919255) else 0
            falls = (
                falls + 1 if falls_by_hand(rewards, best[0], 1) and falls_by_hand(judged, best[1], -1) else 0
            )
        assert (metrics["watch_falls"], metrics["watch_worse"]) == (falls, worse)
        fell = (sum(best[1]) - sum(judged)) / sum(best[1]) if worse else 0.0
        assert metrics["watch_lost"] == pytest.approx(fell)
        assert seen.judged == tuple(best[1])
    assert falls > 1, "the data are made so that the last measurements are a fall"


def test_falls_count_only_in_a_row() -> None:
    """The measurements are: the best, a fall, one in which the reward did not rise, two falls in a row, a new best."""
    prompts, noise = [str(k) for k in range(8)], [0.01 * (k % 3) for k in range(8)]
    seen, falls = WatchedSoFar(), []
    for reward, judged in ((0.0, 1.0), (1.0, 0.5), (0.0, 0.5), (1.0, 0.5), (1.0, 0.4), (1.0, 2.0)):
        said = torch.tensor([judged - each for each in noise], dtype=torch.float64)
        look = Watching(lambda _, said=said: said)  # type: ignore[misc]
        seen, metrics = look.look(scored(prompts, [reward + each for each in noise]), seen)
        falls.append((metrics["watch_falls"], metrics["watch_worse"]))
    assert falls == [(0, 0), (1, 1), (0, 2), (1, 3), (2, 4), (0, 0)]


def test_responses_to_one_prompt_are_one_cluster() -> None:
    """Two prompts have four rows, and the error is that of two differences, not of four."""
    change = change_of(
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.tensor([0.0, 0.0, 0.2, 0.2]),
        rewards_before=torch.zeros(4),
        judged_before=torch.ones(4),
        clusters=torch.tensor([0, 0, 1, 1]),
    )
    assert (change.reward.value, change.reward.num_clusters) == (0.5, 2)
    assert change.reward.standard_error == pytest.approx(0.5)  # the scores are 1 and 0
    assert not change.is_fall


def test_one_prompt_tells_nothing() -> None:
    change = Change(*(Estimate(value, float("nan"), 1, 4) for value in (1.0, -1.0)))
    assert not change.is_fall
    assert pytest.approx(1.96, abs=1e-4) == divergence_of_judges.Z
    assert pytest.approx(3.2905, abs=1e-4) == divergence_of_judges.Z_OF_MANY


def test_the_responses_to_one_prompt_have_no_interval() -> None:
    """Two of two pairs agree, and nobody knows of another prompt; responses to two prompts have one."""
    rewards, judged = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])
    assert agreement_with_interval(rewards, judged, torch.tensor([4, 4])) == ()
    assert agreement_with_interval(rewards, judged, torch.tensor([4, 5])) == (1.0, 1.0, 1.0)


def test_what_is_lost_by_hand() -> None:
    """Four of ten right answers are left of eight: half of the score, and 0.4 in deviations of √((0.16 + 0.24) / 2)."""
    before, now = torch.tensor([1.0] * 8 + [0.0] * 2), torch.tensor([1.0] * 4 + [0.0] * 6)
    fell = Change(Estimate(0.0, 1.0, 10, 10), Estimate(-0.4, 0.1, 10, 10))
    assert share_lost(fell, judged_before=before) == pytest.approx(0.5)
    assert deviations_lost(fell, judged=now, judged_before=before) == pytest.approx(0.4 / math.sqrt(0.2))
    assert math.isnan(deviations_lost(fell, judged=torch.zeros(2), judged_before=torch.ones(2)))
    within = Change(fell.reward, Estimate(-0.4, 0.13, 10, 10))  # 3.08 standard errors
    assert share_lost(within, judged_before=before) == 0.0
    assert deviations_lost(within, judged=now, judged_before=before) == 0.0


def with_agreement(
    scored_rows: Scored, judged: list[float], seen: WatchedSoFar
) -> tuple[WatchedSoFar, dict[str, float]]:
    watching = Watching(lambda _: torch.tensor(judged, dtype=torch.float64))  # type: ignore[arg-type]
    return watching.look(scored_rows, seen)


def test_the_agreement_before_training_stays_as_it_was() -> None:
    """First 3 of 4 pairs agree (standard error 0.289), then none."""
    prompts = [str(k) for k in range(4)]
    seen, first = with_agreement(scored(prompts, [3.0, 1.0, 2.0, 0.0]), [1.0, 1.0, 0.0, 0.0], WatchedSoFar())
    seen, second = with_agreement(scored(prompts, [0.0, 0.0, 1.0, 1.0]), [1.0, 1.0, 0.0, 0.0], seen)
    low, high = 0.75 - 1.959964 * math.sqrt(1 / 12), 1.0  # a share
    for metrics in (first, second):
        found = [metrics[f"watch_initial_pair_accuracy{end}"] for end in ("", "_low", "_high")]
        assert found == pytest.approx([0.75, low, high])
    assert (first["watch_pair_accuracy"], second["watch_pair_accuracy"]) == (0.75, 0.0)
    notice = disagreement_notice(seen.agreement)
    assert notice is not None and "in 75% of the pairs (95 % interval 18% to 100%" in notice
    assert "the reward or the judge may be wrong, and this number cannot show which" in notice


def test_a_judge_that_finds_all_alike_agrees_with_nothing_and_disagrees_with_nothing() -> None:
    seen, metrics = with_agreement(scored(["a", "b"], [0.0, 1.0]), [1.0, 1.0], WatchedSoFar())
    assert seen.agreement == () and disagreement_notice(seen.agreement) is None
    assert not [name for name in metrics if "pair_accuracy" in name]
    assert disagreement_notice((0.8, 0.6, 1.0)) is None


def test_the_lengths_of_right_and_of_wrong_responses_are_apart() -> None:
    """Right ones have 2 and 4 tokens, the wrong one has 9. Where all are right, nothing is wrong."""
    rows = scored(["a", "b", "c"], [1.0, 0.0, 1.0])
    cast(Any, rows.sampled).sequences = SimpleNamespace(lengths=torch.tensor([2, 9, 4]))

    def lengths(judged: list[float], *, is_verifier: bool) -> dict[str, float]:
        judge = cast(Any, lambda _: torch.tensor(judged, dtype=torch.float64))
        metrics = Watching(judge, is_verifier=is_verifier).look(rows, WatchedSoFar())[1]
        return {name: value for name, value in metrics.items() if name.endswith("_length")}

    apart = {"watch_right_length": 3.0, "watch_wrong_length": 9.0}
    assert lengths([1.0, 0.0, 1.0], is_verifier=True) == apart
    assert lengths([1.0, 1.0, 1.0], is_verifier=True) == {"watch_right_length": 5.0}
    assert lengths([1.0, 0.0, 1.0], is_verifier=False) == {}


@pytest.mark.slow
def test_a_watch_that_only_looks_changes_no_bit(pipeline: Any, contents: Contents) -> None:
    plain = pipeline.job("policy", guards="off", validate_every=1)
    looking = pipeline.job(
        "policy",
        watch=Watch(judge=ARITHMETIC, every=2, on_fall="warn"),
        keep=Keep(by="validation"),
        validate_every=1,
    )
    expected, found = run_stage(plain), run_stage(looking)
    assert found.metrics == expected.metrics
    assert contents(looking.output) == contents(plain.output)


def test_the_policy_that_the_judge_likes_best_is_kept(pipeline: Any) -> None:
    job = pipeline.job("policy", validate_every=100, **WATCHED)
    result = run_stage(job)
    curve = [entry.metrics["validation_watch_score"] for entry in read(job.scratch / JOURNAL)]
    assert len(curve) == 4
    for entry in read(job.scratch / JOURNAL):
        assert set(JOURNALLED) <= entry.metrics.keys()
        assert {"watch_right_length", "watch_wrong_length"} & entry.metrics.keys(), "the judge is a verifier"
    best = result.metrics["validation_watch_score"]
    assert best is not None and best >= max(curve)
    iteration = int(result.metrics["best_iteration"] or 0)
    assert iteration == 0 or curve[iteration - 1] == best
    validation = [entry.metrics["validation_score"] for entry in read(job.scratch / JOURNAL)]
    if iteration:
        assert result.metrics["validation_score"] == validation[iteration - 1]


def falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every measurement after the first be a fall."""
    counted = []

    def load(*_: Any, **__: Any) -> Callable[[Any], torch.Tensor]:
        def judge(sampled: Any) -> torch.Tensor:
            counted.append(len(counted))
            return torch.full((len(sampled.prompts),), 4.0 - len(counted))

        return judge

    rose = Estimate(1.0, 0.1, 8, 16)
    monkeypatch.setattr(watching, "load_judge", load)
    monkeypatch.setattr(watching, "change_of", lambda *_, **__: Change(rose, Estimate(-1.0, 0.1, 8, 16)))


def test_disagreement_is_shown_before_training_and_recorded_after_a_kill(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A judge of right and wrong by turns knows nothing about the reward."""

    def load(*_: Any, **__: Any) -> Callable[[Any], torch.Tensor]:
        return lambda sampled: torch.arange(len(sampled.prompts)) % 2.0

    monkeypatch.setattr(watching, "load_judge", load)
    job = pipeline.job("policy", checkpoint_every=1, folder=tmp_path, **WATCHED)
    with killed_in(1, monkeypatch):
        run_stage(job)
    shown = read_progress(job.scratch / PROGRESS)
    assert shown is not None
    [notice] = shown.notices
    assert notice.startswith(
        "before training, the reward prefers the response that the watch's judge prefers"
    )
    result = run_stage(pipeline.job("policy", checkpoint_every=1, folder=tmp_path, **WATCHED))
    initial = [
        [entry.metrics[f"watch_initial_pair_accuracy{end}"] for end in ("", "_low", "_high")]
        for entry in read(job.scratch / JOURNAL)
    ]
    assert len(initial) == 4 and all(each == initial[0] for each in initial)
    value, low, high = initial[0]
    assert f"in {value:.0%} of the pairs (95 % interval {low:.0%} to {high:.0%}" in notice
    [firing] = result.firings
    assert (firing.step, firing.values, firing.is_default) == (1, (low,), True)
    assert "one of them may be wrong, and the curves cannot show which" in str(firing)


@pytest.mark.parametrize("kill_in", [None, 0, 1])
def test_after_two_falls_the_stage_ends_with_the_policy_that_the_judge_liked_best(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kill_in: int | None
) -> None:
    falling(monkeypatch)
    job = pipeline.job("policy", checkpoint_every=1, folder=tmp_path, **WATCHED)
    if kill_in is not None:
        with killed_in(kill_in, monkeypatch):
            run_stage(job)
        job = pipeline.job("policy", checkpoint_every=1, folder=tmp_path, **WATCHED)
    result = run_stage(job)
    assert str(result.ended_early) == "finished at 2 of 4 by guard watch_falls"
    firing, lost = result.firings
    assert (lost.guard.metric, lost.is_default) == ("watch_lost", True)
    assert str(firing) == (
        "guard watch: the reward rose and the judge's score fell, at 2 measurements in a row: fired after step 2 (2); "
        "the stage ended with the weights that measured best"
    )
    assert result.metrics["best_iteration"] == 0
    init = load_file(pipeline.folder("sft") / "model.safetensors")
    kept = load_file(job.output / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in init.items())


@pytest.mark.slow
def test_a_fall_can_stop_or_only_warn(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    falling(monkeypatch)
    warned = run_stage(pipeline.job("policy", watch=Watch(judge=ARITHMETIC, every=1, on_fall="warn")))
    assert warned.ended_early is None
    assert [(firing.step, firing.guard.metric) for firing in warned.firings] == [
        (2, "watch_falls"),
        (2, "watch_lost"),
    ]
