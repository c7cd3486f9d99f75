"""A comparison of two models gives the means that are worked out by hand from judgements and responses."""

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from vantage.algorithms.swapped_verdicts import SwappedVerdicts
from vantage.algorithms.uncertainty import clustered_mean
from vantage.models.sequences import collate
from vantage.schemas.recipe.rewards import Judge, Reward
from vantage.schemas.recipe.terms import ModelTerm
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import estimated_metric_names, headline_metric_names
from vantage.schemas.records.uncertainty import interval_of
from vantage.tasks import evaluation
from vantage.tasks.data.rows import read_rows
from vantage.tasks.evaluation import ROLES, run, shown
from vantage.tasks.rewards import model_scores
from vantage.tasks.rollout.comparison import (
    Estimates,
    Judged,
    Pairs,
    compare_judgements,
    compare_likelihoods,
    compare_texts,
    greedy_means,
)
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training import networks
from vantage.tasks.training.likelihood import MeasuredLikelihood
from vantage.tasks.training.measured import clusters_of

KL = {"kl_to_baseline", "kl_to_baseline_per_token"}


def judged(
    judgements: list[float], lengths: list[int], ended: list[bool], prompts: list[str] | None = None
) -> Judged:
    prompts = prompts or [f"p{index // 2}" for index in range(len(judgements))]
    sequences = collate([[1]] * len(lengths), [[5] * length for length in lengths], pad_token_id=0)
    sampled = Sampled(
        prompts=prompts,
        answers=[None] * len(prompts),
        responses=[f"r{index}" for index in range(len(judgements))],
        sequences=sequences,
        ended=torch.tensor(ended),
        sampler_logprobs=torch.zeros(sequences.response_ids.shape),
    )
    return Judged(sampled=sampled, judgements={"accuracy": torch.tensor(judgements)})


def compare(judged: dict[str, Judged], greedy: dict[str, Judged], samples_per_prompt: int = 2) -> Estimates:
    pairs = Pairs(judged["candidate"], judged["baseline"], samples_per_prompt, seed=5)
    return {**compare_judgements(pairs), **compare_texts(pairs), **greedy_means(greedy)}


def plainly(judgements: list[float], prompts: list[str]) -> Judged:
    return judged(judgements, [1] * len(judgements), [True] * len(judgements), prompts)


def test_gain_win_rate_and_error_by_hand() -> None:
    """Two prompts have two responses each, with differences 1, 0 and 0, −1, so the prompts' means are 0.5 and −0.5.

    The gain is 0. The standard deviation of (0.5, −0.5) with ddof 1 is √0.5, and over √2 it is a standard error of 0.5.
    """
    candidate = judged([1.0, 1.0, 0.0, 0.0], [4, 6, 2, 8], [True, True, False, True])
    baseline = judged([0.0, 1.0, 0.0, 1.0], [3, 3, 3, 3], [True] * 4)
    greedy = {"candidate": plainly([1.0, 0.0], ["p0", "p1"]), "baseline": plainly([1.0, 1.0], ["p0", "p1"])}
    found = compare({"candidate": candidate, "baseline": baseline}, greedy)
    by_hand = {
        "accuracy": 0.5,
        "baseline_accuracy": 0.5,
        "accuracy_gain": 0.0,
        "win_rate": 0.5,
        "truncated_share": 0.25,
        "mean_response_length": 5.0,
        "baseline_mean_response_length": 3.0,
        "greedy_accuracy": 0.5,
        "baseline_greedy_accuracy": 1.0,
        "tied_pairs": 0.5,
        "pass_at_2": 0.5,  # both of the first prompt right, none of the second
        "baseline_pass_at_2": 1.0,
        "pass_at_2_difference": -0.5,
        "baseline_truncated_share": 0.0,
        "truncated_share_difference": 0.25,
        "mean_response_length_difference": 2.0,
        "distinct_1": (1 / 8 + 1 / 9)
        / 2,  # one token 3 + 5 times, and 2 + 7 times (the response of 2 tokens was cut off)
    }
    assert {metric: found[metric].value for metric in by_hand} == pytest.approx(by_hand)
    assert found["accuracy_gain"].standard_error == pytest.approx(0.5)
    assert found["win_rate"].standard_error == pytest.approx(0.25)  # 0.75 and 0.25 by prompt
    assert found["accuracy"].standard_error == pytest.approx(0.5)
    assert (found["accuracy"].num_clusters, found["accuracy"].num_rows) == (2, 4)
    assert found.keys() | KL == estimated_metric_names("evaluation", has=("verifier", "samples.2"))


def test_what_is_measured_of_a_prompt_is_one_row_of_it() -> None:
    """Two prompts have two responses each; pass@2 and distinct n-grams have one value per prompt."""
    candidate = judged([1.0, 1.0, 0.0, 0.0], [4, 6, 2, 8], [True] * 4)
    baseline = judged([0.0, 1.0, 0.0, 1.0], [3, 3, 3, 3], [True] * 4)
    found = compare({"candidate": candidate, "baseline": baseline}, {})
    for metric in (
        "pass_at_2",
        "baseline_pass_at_2",
        "pass_at_2_difference",
        "distinct_1",
        "distinct_1_difference",
    ):
        assert (found[metric].num_clusters, found[metric].num_rows) == (2, 2), metric
    # right for p0 alone, and for both: differences 0 and −1, whose standard deviation is √½, over √2
    assert found["pass_at_2_difference"].value == -0.5
    assert found["pass_at_2_difference"].standard_error == pytest.approx(0.5)


def test_pairs_differ_where_one_of_the_two_was_cut_off() -> None:
    """Both responses of the first pair and the candidate's of the second were cut off, so one of four pairs differs."""
    candidate = judged([1.0] * 4, [4] * 4, [False, False, True, True])
    baseline = judged([1.0] * 4, [4] * 4, [False, True, True, True])
    found = compare({"candidate": candidate, "baseline": baseline}, {})["truncated_share_difference"]
    assert (found.value, found.differing) == (0.25, 0.25)


def test_a_ratio_of_perplexities_has_the_error_of_the_difference() -> None:
    """Two rows of two tokens have NLL 2 and 4 against 1 and 1, so the ratio is e^(6/4) / e^(2/4) = e.

    The differences 1 and 3 are −1 and 1 off their mean of 2. The error of their mean per token is √(2 · 2 / 16) = ½,
    and that of the ratio is e/2.
    """
    tokens, clusters = torch.tensor([2, 2]), torch.tensor([0, 1])
    candidate, baseline = (
        MeasuredLikelihood(nll=torch.tensor(nll), num_tokens=tokens, clusters=clusters)
        for nll in ([2.0, 4.0], [1.0, 1.0])
    )
    found = compare_likelihoods(candidate, baseline)
    assert found["perplexity_ratio"].value == pytest.approx(math.e)
    assert found["perplexity_ratio"].standard_error == pytest.approx(math.e / 2)
    assert found["baseline_perplexity"].standard_error == 0.0
    assert found["response_nll_difference"].value == 2.0


def test_prompts_without_an_ngram_are_no_part_of_its_mean() -> None:
    """The candidate answers the first prompt with the end token alone and the second with 3 + 3 equal tokens: 1/6.

    The baseline answers each with 2 + 2 equal tokens: 1/4. The difference is that of the second prompt, 1/6 − 1/4.
    """
    candidate = judged([0.0] * 4, [1, 1, 4, 4], [True] * 4)
    baseline = judged([0.0] * 4, [3] * 4, [True] * 4)
    found = compare_texts(Pairs(candidate, baseline, 2, seed=5))
    means = {
        name: found[name].value for name in ("distinct_1", "baseline_distinct_1", "distinct_1_difference")
    }
    assert means == pytest.approx({
        "distinct_1": 1 / 6, "baseline_distinct_1": 1 / 4, "distinct_1_difference": 1 / 6 - 1 / 4,
    })  # fmt: skip
    assert [found[name].num_clusters for name in means] == [1, 2, 1]
    assert found["distinct_3"].value == pytest.approx(1 / 2)  # one trigram twice
    assert found["baseline_distinct_3"].value != found["baseline_distinct_3"].value, (
        "nobody said three tokens"
    )


def test_equal_responses_are_ties_though_their_scores_were_rounded_otherwise() -> None:
    """The first pair of equal responses is a tie. In the second one response was cut off, so the two are not equal."""

    def scored(scores: list[float], ended: list[bool]) -> Judged:
        of_verdicts = judged(scores, [2] * len(scores), ended)
        return Judged(of_verdicts.sampled, {"score": of_verdicts.judgements["accuracy"]})

    candidate = scored([0.5 + 2**-20, 1.0 + 2**-20], [True, True])
    found = compare_judgements(Pairs(candidate, scored([0.5, 1.0], [True, False]), 2, seed=5))
    assert (found["tied_pairs"].value, found["win_rate"].value) == (0.5, 0.75)
    assert found["score_gain"].value == 2**-21


def test_a_prompt_in_several_rows_of_the_test_split_is_one_prompt() -> None:
    """Rows of ``p`` and ``q`` alternate, with gains 1 for ``p`` and 0 for ``q``. The error is 0.5, and not √(1/12)."""
    prompts = ["p", "q", "p", "q"]
    found = compare(
        {"candidate": plainly([1.0, 0.0, 1.0, 0.0], prompts), "baseline": plainly([0.0] * 4, prompts)},
        dict.fromkeys(("candidate", "baseline"), plainly([0.0] * 4, prompts)),
        samples_per_prompt=1,
    )
    assert found["accuracy_gain"].standard_error == pytest.approx(0.5)
    assert found["greedy_accuracy"].num_clusters == 2


def test_the_error_of_a_gain_is_its_true_spread_where_prompts_stand_in_four_rows() -> None:
    """60 prompts have 4 rows each, which are all right or all wrong, so the gain's spread is √(2·0.24/60) = 0.089.

    If the 240 rows were independent, it would be half of that.
    """
    rng = random.Random(11)
    prompts = [f"p{prompt}" for prompt in range(60) for _ in range(4)]
    gains, told = [], []
    for _ in range(600):
        right = {role: [float(rng.random() < 0.6) for _ in range(60)] for role in ("a", "b")}
        rows = {role: [each for each in values for _ in range(4)] for role, values in right.items()}
        difference = torch.tensor(rows["a"]) - torch.tensor(rows["b"])
        found = clustered_mean(difference, clusters_of(prompts))
        gains.append(found.value)
        told.append(found.standard_error**2)
    assert statistics.fmean(told) ** 0.5 == pytest.approx(0.0894, rel=0.03)
    assert statistics.pstdev(gains) == pytest.approx(0.0894, rel=0.1)


def test_what_is_shown_is_the_first_prompts_whatever_came_of_them() -> None:
    candidate = judged([0.0] * 8, [1] * 8, [True] * 8)
    rows = shown(Pairs(candidate, candidate, 2, seed=0))
    assert [row["prompt"] for row in rows] == ["p0", "p1", "p2", "p3"]
    assert [row["candidate"] for row in rows] == ["r0", "r2", "r4", "r6"]
    many = judged([0.0] * 60, [1] * 60, [True] * 60)
    assert len(shown(Pairs(many, many, 2, seed=0))) == 20


def test_every_response_to_every_test_prompt_is_kept(pipeline: Any) -> None:
    folder = pipeline.folder("evaluation")
    prompts = [row["prompt"] for row in read_rows(pipeline.folder("prompts"), "test")]
    for role in ("candidate", "baseline"):
        rows = read_rows(folder, role)
        assert [row["prompt"] for row in rows] == [prompt for prompt in prompts for _ in range(2)]
        accuracy = sum(row["judgement"] for row in rows) / len(rows)
        name = "accuracy" if role == "candidate" else "baseline_accuracy"
        assert pipeline.metrics("evaluation")[name] == pytest.approx(accuracy)


def test_a_model_against_itself_gains_nothing(pipeline: Any, tmp_path: Any) -> None:
    """Both sides draw from the same random stream, so equal models give equal responses."""
    job = pipeline.job("evaluation", folder=tmp_path)
    job = job.model_copy(update={"inputs": {**job.inputs, "candidate": job.inputs["baseline"]}})
    metrics = run(job).metrics
    assert metrics["accuracy_gain"] == 0.0
    assert metrics["win_rate"] == 0.5
    assert metrics["length_controlled_win_rate"] == 0.5
    assert metrics["kl_to_baseline"] == metrics["kl_to_baseline_per_token"] == 0.0
    differences = [value for name, value in metrics.items() if name.endswith("_difference")]
    assert len(differences) == 6
    assert set(differences) == {0.0}


def test_a_reward_can_be_the_judge(pipeline: Any, tmp_path: Any) -> None:
    job = pipeline.job("evaluation", folder=tmp_path, judge=Judge(reward="main"))
    inputs = {**job.inputs, "reward.main.0": pipeline.folder("reward")}
    rewards = pipeline.job("policy").rewards
    result = run(job.model_copy(update={"inputs": inputs, "rewards": rewards}))
    metrics = result.metrics
    assert result.uncertainty.keys() == estimated_metric_names("evaluation", has=("reward", "samples.2"))
    assert metrics["score_gain"] == pytest.approx(metrics["score"] - metrics["baseline_score"], abs=1e-5)
    assert metrics.keys() == headline_metric_names("evaluation", has=("reward", "samples.2"))


def test_a_models_verdict_for_the_candidate_is_against_the_baseline(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 pairs the model prefers the candidate in 2 and the baseline in 10, and 4 are ties, so the rate is 4/16."""

    def verdicts(_: object, candidate: Any, baseline: Any) -> SwappedVerdicts:
        assert len(candidate.sampled.sampled.prompts) == len(baseline.sampled.sampled.prompts) == 16
        wins = torch.tensor([1.0] * 2 + [0.5] * 4 + [0.0] * 10, dtype=torch.float64)
        return SwappedVerdicts(wins=wins, disagree=wins == 0.5)

    monkeypatch.setattr(evaluation, "ask_model", verdicts)
    result = run(pipeline.job("evaluation", folder=tmp_path, judge=Judge(model="judge")))
    assert (result.metrics["win_rate"], result.metrics["tied_pairs"]) == (0.25, 0.25)
    kept = [[row["judgement"] for row in read_rows(tmp_path / "output", role)] for role in ROLES]
    assert kept == [[1.0] * 2 + [0.5] * 4 + [0.0] * 10, [0.0] * 2 + [0.5] * 4 + [1.0] * 10]


@pytest.mark.slow
def test_each_model_is_loaded_once(pipeline: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies are each sampled and asked greedily, and one reward model judges all four."""
    loaded: list[str] = []

    def counting(module: Any, name: str) -> None:
        load = getattr(module, name)

        def count(files: Any, **settings: Any) -> Any:
            loaded.append(f"{name} {files.folder.parent.name}")
            return load(files, **settings)

        monkeypatch.setattr(module, name, count)

    job = pipeline.job("evaluation", folder=tmp_path, judge=Judge(reward="main"))
    inputs = {**job.inputs, "reward.main.0": pipeline.folder("reward")}
    counting(networks, "load_stored_policy")
    counting(model_scores, "load_scalar")
    rewards = {"main": Reward(terms=(ModelTerm(model="reward"),))}
    run(job.model_copy(update={"inputs": inputs, "rewards": rewards}))
    assert sorted(loaded) == [
        "load_scalar reward",
        "load_stored_policy policy",
        "load_stored_policy sft",
    ]


def test_two_judges_and_demonstrations(pipeline: Any, tmp_path: Path) -> None:
    """A verifier and a reward judge the same responses; both models read the same demonstrations."""
    job = pipeline.job("evaluation", folder=tmp_path)
    work = job.work.model_copy(update={"also": Judge(reward="main"), "demonstrations": "demonstrations"})
    inputs = {
        **job.inputs,
        "reward.main.0": pipeline.folder("reward"),
        "demonstrations": pipeline.folder("demonstrations"),
    }
    rewards = pipeline.job("policy").rewards
    result = run(job.model_copy(update={"work": work, "inputs": inputs, "rewards": rewards}))
    has = settings_of(work.model_dump())
    assert result.metrics.keys() == headline_metric_names("evaluation", has=has)
    assert result.uncertainty.keys() == estimated_metric_names("evaluation", has=has)
    alone = pipeline.metrics("evaluation")
    assert {name: result.metrics[name] for name in alone} == alone  # the second judge changes nothing
    rows = read_rows(job.output, "candidate")
    scores = [row["also_judgement"] for row in rows]
    assert result.metrics["score"] == pytest.approx(statistics.fmean(scores), abs=1e-5)
    assert {row["judgement"] for row in rows} <= {0.0, 1.0}
    assert result.metrics["perplexity"] > 1
    low, high = interval_of(
        "perplexity", result.metrics["perplexity"], result.uncertainty["perplexity"], confidence=0.95
    ) or (0, 0)
    assert low < result.metrics["perplexity"] < high


def test_models_with_other_tokenizers_have_no_divergence(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "tokenizer_digest", lambda folder: folder.parent.name)
    job = pipeline.job("evaluation", folder=tmp_path)
    work = job.work.model_copy(update={"demonstrations": "demonstrations"})
    inputs = {**job.inputs, "demonstrations": pipeline.folder("demonstrations")}
    result = run(job.model_copy(update={"work": work, "inputs": inputs}))
    for name in ("kl_to_baseline", "kl_to_baseline_per_token", "perplexity_ratio"):
        assert result.metrics[name] is None
        assert result.uncertainty[name].standard_error is None
    assert result.metrics["perplexity"] != result.metrics["baseline_perplexity"]
    assert result.metrics["accuracy"] == pipeline.metrics("evaluation")["accuracy"]


def with_critic(pipeline: Any, folder: Path) -> Any:
    job = pipeline.job("evaluation", folder=folder, critic="value")
    return job.model_copy(update={"inputs": {**job.inputs, "critic": pipeline.folder("value")}})


def test_the_critics_values_are_those_of_transformers(pipeline: Any, tmp_path: Path) -> None:
    """Each response is read on its own, unpadded, by the critic's trunk as transformers loads it, in float64; the head is one
    product. A value has seen what stands before its token."""
    result = run(with_critic(pipeline, tmp_path))
    folder = pipeline.folder("value")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float64)
    head = {name: tensor.double() for name, tensor in load_file(folder / "head.safetensors").items()}
    read = 0
    for sample in result.samples:
        for role in ("candidate", "baseline"):
            tokens = sample[f"{role}_tokens"]
            prompt = tokenizer(sample["prompt"])["input_ids"]
            response = tokenizer.convert_tokens_to_ids([text for text, _, _ in tokens])
            assert [tokenizer.decode([each]) for each in response] == [text for text, _, _ in tokens]
            with torch.no_grad():
                states = trunk(torch.tensor([prompt + response])).last_hidden_state[0]
            expected = (states @ head["weight"].T + head["bias"]).squeeze(-1)
            expected = expected[len(prompt) - 1 : len(prompt) - 1 + len(response)]
            found = torch.tensor([value for _, _, value in tokens], dtype=torch.float64)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            read += len(tokens)
    assert read > 100


def test_a_critic_changes_nothing_else(pipeline: Any, tmp_path: Path) -> None:
    """Metrics, kept rows, and all that is shown of each token except its value stay the same."""
    result, without = run(with_critic(pipeline, tmp_path)), pipeline.result("evaluation")
    assert result.metrics == without.metrics
    assert result.uncertainty == without.uncertainty
    for role in ("candidate", "baseline"):
        name = f"{role}.parquet"
        kept = pipeline.folder("evaluation") / name
        assert (tmp_path / "output" / name).read_bytes() == kept.read_bytes()
        for ours, theirs in zip(result.samples, without.samples, strict=True):
            assert [token[:2] for token in ours[f"{role}_tokens"]] == theirs[f"{role}_tokens"]


def test_a_critic_with_another_tokenizer_is_refused_before_anything_is_sampled(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_critic(pipeline, tmp_path)
    monkeypatch.setattr(evaluation, "tokenizer_digest", lambda folder: str(folder == job.inputs["critic"]))
    monkeypatch.setattr(evaluation, "load_sampler", lambda *given: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match="critic='value' has another tokenizer than candidate='policy'"):
        run(job)
