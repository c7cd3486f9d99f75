"""In every stage that asks a verifier, each response is judged with the answer of its own prompt's row."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.own_rewards import rollouts_of
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.inputs import Data, Split
from vantage.schemas.recipe.rewards import Judge, Reward
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.recipe.verifiers import Verifier
from vantage.schemas.recipe.work import ImportVerifier, PrepareData
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.rows import read_rows
from vantage.tasks.rollout.rollouts import Sampled, Scored
from vantage.tasks.stages import run_stage
from vantage.tasks.updates import gathering, own_responses

VERIFIER = """\
def verify(prompt: str, response: str, answer: str | None) -> bool:
    assert answer is not None
    owner, _, parity = answer.partition(":")
    if owner != prompt:
        raise ValueError(f"the answer to {owner!r} stands beside {prompt!r}")
    return len(response) % 2 == int(parity)
"""
REWARD = {"main": Reward(terms=(VerifierTerm(verifier="parity", wrong=-1.0),))}
ROWS = [
    {"question": f"{n % 10} a+{n // 10} b-{n % 7 + 1}?", "solution": {"parity": n * n % 3 % 2}}
    for n in range(60)
]
PARITY = {row["question"]: row["solution"]["parity"] for row in ROWS}


def is_right(prompt: str, response: str) -> bool:
    """Return the rule's verdict from the table above, past everything that carries answers along."""
    return len(response) % 2 == PARITY[prompt]


def paid(sampled: Sampled) -> list[float]:
    return [1.0 if is_right(*case) else -1.0 for case in zip(sampled.prompts, sampled.responses, strict=True)]


def made(pipeline: Any, folder: Path, work: Any, **inputs: Path) -> Path:
    """Return the output of an implicit step."""
    (folder / "output").mkdir(parents=True)
    (folder / "scratch").mkdir()
    job = pipeline.job("model").model_copy(
        update={
            "name": "verifiers.parity",
            "work": work,
            "inputs": inputs,
            "scratch": folder / "scratch",
            "output": folder / "output",
        }
    )
    run_stage(job)
    return folder / "output"


@pytest.fixture(scope="module")
def inputs(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return prompts with answers, mapped from a file, and the verifier's copy."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = Data(
        source=str(folder / "rows.jsonl"),
        columns={"prompt": "question", "answer": "{question}:{solution.parity}"},
        split=Split(validation=8, test=8),
    )
    (folder / "parity.py").write_text(VERIFIER)
    prompts = made(pipeline, folder / "prompts", PrepareData(content="prompts", data=data, alone=True))
    verifier = ImportVerifier(verifier=Verifier(source=str(folder / "parity.py")))
    return {
        "prompts": prompts,
        "verifier": made(pipeline, folder / "parity", verifier, **{"prompts.0": prompts}),
    }


def policy_job(pipeline: Any, inputs: dict[str, Path], algorithm: dict[str, Any], **fields: Any) -> StageJob:
    work = PolicyOptimization.model_validate(
        {
            "kind": "policy_optimization",
            "algorithm": algorithm,
            "init": "sft",
            "reward": "main",
            "prompts": "prompts",
            "iterations": 3,
            "batch_size": 16,
            "minibatch_size": 16,
            "validation_samples": 8,
            "learning_rate": 1e-6,
            **fields,
        }
    )
    sft = pipeline.folder("sft")
    job: StageJob = pipeline.job("sft").model_copy(
        update={
            "work": work,
            "rewards": REWARD,
            "inputs": {
                "init": sft,
                "reference": sft,
                "prompts": inputs["prompts"],
                "reward.main.0": inputs["verifier"],
                "positive_verifier": inputs["verifier"],
            },
        }
    )
    return job


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "reinforce_pp"},
        {"preset": "grpo", "samples_per_prompt": 4},
        {"preset": "dapo", "samples_per_prompt": 2, "max_sampling_rounds": 4},
    ],
    ids=["one response a prompt", "groups", "dynamic sampling"],
)
def test_every_response_of_a_rollout_is_paid_by_its_prompts_answer(
    algorithm: dict[str, Any], pipeline: Any, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    positives = {"positive_nll_coef": 0.1, "positive_verifier": "parity"}
    seen = rollouts_of(policy_job(pipeline, inputs, {**algorithm, **positives}), monkeypatch)
    assert len(seen) == 3
    for rollout, estimates in seen:
        expected = paid(rollout.sampled)
        assert set(expected) == {1.0, -1.0}, "a rule that always says the same proves nothing"
        assert rollout.scores.total.tolist() == expected
        assert estimates.is_positive.tolist() == [score > 0 for score in expected]
        assert rollout.sampled.answers == [f"{p}:{PARITY[p]}" for p in rollout.sampled.prompts]
        if algorithm["preset"] == "dapo":
            groups = list(zip(expected[::2], expected[1::2], strict=True))
            assert any(one != other for one, other in groups)
            prompts = rollout.sampled.prompts
            assert prompts[::2] == prompts[1::2]


@pytest.mark.slow
def test_a_greedy_baseline_is_paid_by_its_prompts_answer(
    pipeline: Any, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    baselines: list[tuple[Scored, Scored | None]] = []
    sample_greedy = gathering.sample_greedy

    def remember(work: Any, models: Any, prompts: Any, scored: Scored) -> Scored | None:
        baselines.append((scored, sample_greedy(work, models, prompts, scored)))
        return baselines[-1][1]

    monkeypatch.setattr(gathering, "sample_greedy", remember)
    rollouts_of(policy_job(pipeline, inputs, {"preset": "remax"}, iterations=2), monkeypatch)
    for scored, greedy in baselines:
        assert greedy is not None
        assert greedy.sampled.prompts == scored.sampled.prompts
        assert greedy.sampled.answers == scored.sampled.answers
        assert greedy.scores.total.tolist() == paid(greedy.sampled)
    assert {score for _, greedy in baselines for score in greedy.scores.total.tolist()} == {1.0, -1.0}  # type: ignore[union-attr]


def test_one_prompt_with_two_answers_keeps_both_apart(
    pipeline: Any, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Demonstrations may have such prompts: the greedy response is one, but it has two verdicts."""
    rows = [
        {"prompt": f"{n} a+2?", "response": f"r{n}{parity}", "answer": f"{n} a+2?:{parity}"}
        for n in range(9)
        for parity in (0, 1)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(
        source=str(tmp_path / "rows.jsonl"),
        columns={column: column for column in ("prompt", "response", "answer")},
        split=Split(validation=1, test=1),
    )
    demonstrations = made(
        pipeline, tmp_path / "d", PrepareData(content="demonstrations", data=data, alone=True)
    )
    job = policy_job(pipeline, {**inputs, "prompts": demonstrations}, {"preset": "remax"}, iterations=1)
    baselines: list[tuple[Scored, Any]] = []
    sample_greedy = gathering.sample_greedy

    def remember(work: Any, models: Any, prompts: Any, scored: Scored) -> Any:
        baselines.append((scored, sample_greedy(work, models, prompts, scored)))
        return baselines[-1][1]

    monkeypatch.setattr(gathering, "sample_greedy", remember)
    rollouts_of(job, monkeypatch)
    [(scored, greedy)] = baselines
    for each in (scored, greedy):
        parities = [int(str(answer).partition(":")[2]) for answer in each.sampled.answers]
        lengths = [len(response) for response in each.sampled.responses]
        right = [length % 2 == parity for length, parity in zip(lengths, parities, strict=True)]
        assert each.scores.total.tolist() == [1.0 if one else -1.0 for one in right]
    assert greedy.sampled.answers == scored.sampled.answers
    assert len(set(scored.sampled.answers)) > len(set(scored.sampled.prompts))


def test_the_best_of_n_is_chosen_by_the_answer(
    pipeline: Any, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Scored] = []
    sample = own_responses.sample_and_score

    def remember(*args: Any, **kwargs: Any) -> Scored:
        seen.append(sample(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(own_responses, "sample_and_score", remember)
    work = BestOfN(
        kind="best_of_n",
        init="sft",
        reward="main",
        prompts="prompts",
        iterations=1,
        batch_size=16,
        minibatch_size=4,
        samples_per_prompt=4,
        validation_samples=4,
        learning_rate=1e-5,
    )
    job = policy_job(pipeline, inputs, {"preset": "grpo", "samples_per_prompt": 4})
    run_stage(job.model_copy(update={"work": work}))
    [scored] = seen
    assert scored.scores.total.tolist() == paid(scored.sampled)


def test_an_evaluation_is_judged_by_the_answers(pipeline: Any, inputs: dict[str, Path]) -> None:
    work = PolicyEvaluation(
        kind="evaluation",
        candidate="sft",
        baseline="model",
        judge=Judge(verifier="parity"),
        prompts="prompts",
        samples_per_prompt=3,
    )
    roles = {"candidate": pipeline.folder("sft"), "baseline": pipeline.folder("model")}
    job = pipeline.job("evaluation", **dict(work)).model_copy(
        update={"inputs": {**roles, "prompts": inputs["prompts"], "judge": inputs["verifier"]}}
    )
    result = run_stage(job)
    rows = read_rows(job.output, "candidate")
    assert len(rows) == 24
    expected = [float(is_right(row["prompt"], row["response"])) for row in rows]
    assert [row["judgement"] for row in rows] == expected
    assert result.metrics["accuracy"] == pytest.approx(sum(expected) / 24)
    assert set(expected) == {0.0, 1.0}


@pytest.mark.slow
def test_pairs_are_collected_by_the_answers(pipeline: Any, inputs: dict[str, Path], tmp_path: Path) -> None:
    work = PreferenceCollection(
        kind="preference_collection",
        policy="sft",
        prompts="prompts",
        judge=Judge(verifier="parity"),
        samples_per_prompt=4,
        batch_size=16,
    )
    (tmp_path / "output").mkdir()
    (tmp_path / "scratch").mkdir()
    roles = {"policy": pipeline.folder("sft"), "prompts": inputs["prompts"], "judge": inputs["verifier"]}
    places = {"scratch": tmp_path / "scratch", "output": tmp_path / "output"}
    run_stage(pipeline.job("sft").model_copy(update={"work": work, "inputs": roles, **places}))
    pairs = read_rows(tmp_path / "output", "train")
    assert pairs
    assert all(is_right(pair["prompt"], pair["chosen"]) for pair in pairs)
    assert not any(is_right(pair["prompt"], pair["rejected"]) for pair in pairs)
