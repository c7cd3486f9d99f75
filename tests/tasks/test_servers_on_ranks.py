"""Stages on two gloo ranks ask judges, a reward server, a judging model and a teacher each question once, and get the scores of one process."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.fake_judge_server import FakeJudge
from tests.support.fake_vllm_server import serving
from tests.tasks.alike import ADAM_EPS, run_to_compare
from tests.tasks.test_asked_meanwhile import judged
from tests.tasks.test_distillation_by_server import served_job
from tests.tasks.test_stages_on_ranks import last_metrics, of_kind, of_preset, result_of, start
from vantage.ledger.journal import read
from vantage.models.folders import load_policy
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.inputs import Data, Split
from vantage.schemas.recipe.judging_models import JudgingModel
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.score_rules import ScoreRange, ScoreRule
from vantage.schemas.recipe.served_scores import JudgeServer, RewardServer
from vantage.schemas.recipe.terms import HttpTerm, JudgeTerm, JudgingModelTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards import answer_file
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import ANSWERS, JOURNAL

pytestmark = pytest.mark.slow

CRITERIA = {"clear": "Is it clear?", "kind": "Is it kind?"}
FAILING = 0.3


@pytest.fixture
def servers() -> Iterator[tuple[FakeJudge, FakeJudge]]:
    with FakeJudge(names=("clear", "kind", "score")) as judge, FakeJudge(names=("brief",)) as server:
        yield judge, server


@pytest.fixture(autouse=True)
def fresh() -> Callable[[], None]:
    """Forget all open files of answers, as a new process does."""
    answer_file._opened.cache_clear()
    return answer_file._opened.cache_clear


@pytest.fixture
def prompts(pipeline: Any, tmp_path: Path) -> Path:
    """Return prompts with answers, of which every third prompt has two: other questions, though the prompt is the same."""
    given = [f"{number} + {number % 7} = " for number in range(60)]
    rows = [{"prompt": text, "answer": str(number)} for number, text in enumerate(given)]
    rows += [{"prompt": text, "answer": f"-{number}"} for number, text in enumerate(given) if number % 3 == 0]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(source=str(file), split=Split(validation=4, test=4))
    job: StageJob = pipeline.job("prompts", folder=tmp_path / "prepared", data=data)
    run_stage(job)
    return job.output


def scored_by_servers(
    pipeline: Any, folder: Path, prompts: Path, judge: FakeJudge, server: FakeJudge
) -> StageJob:
    """Return a job that collects responses whose reward has a rubric, a comparison and a reward server."""
    rubric = JudgeServer(url=f"{judge.url}/v1", model="m", name="rubric", criteria=CRITERIA, at_once=4)
    rival = JudgeServer(url=f"{judge.url}/v1", model="m", name="rival", against="answer", at_once=3)
    brief = RewardServer(url=server.url, version="1", names=("brief",), batch=5)
    rules = {
        "clear": ScoreRule(weight=2.0, clip=ScoreRange(low=3)),
        "kind": ScoreRule(weight=-1.0, offset=-5.0),
    }
    terms = (
        JudgeTerm(judge=rubric, weight=0.5, scores=rules),
        JudgeTerm(judge=rival, weight=3.0),
        HttpTerm(http=brief, weight=0.25),
    )
    job = of_kind("collected", microbatch_size=16)(pipeline, folder)
    inputs = {role: path for role, path in job.inputs.items() if not role.startswith("reward")}
    inputs["prompts"] = prompts
    rewards = {"main": Reward(terms=terms, missing_eos=MissingEos(subtract=0.5))}
    return job.model_copy(update={"rewards": rewards, "inputs": inputs})


def scored_by_a_model(pipeline: Any, folder: Path) -> StageJob:
    """Return a job that collects responses which the pipeline's policy judges by two criteria."""
    judge = JudgingModel(
        model="grader", scale=(1, 5), criteria=CRITERIA, prompt="{prompt}{response}{criterion}"
    )
    rules = {"clear": ScoreRule(weight=2.0), "kind": ScoreRule(weight=-1.0, clip=ScoreRange(low=2.5))}
    job = of_kind("collected", microbatch_size=16)(pipeline, folder)
    inputs = job.inputs | {"reward.main.0": pipeline.folder("sft")}
    rewards = {"main": Reward(terms=(JudgingModelTerm(judge=judge, scores=rules),))}
    digests = {**job.digests, "reward.main.0": "d" * 64}
    return job.model_copy(update={"rewards": rewards, "inputs": inputs, "digests": digests})


def optimised_by_a_judge(pipeline: Any, folder: Path, judge: FakeJudge) -> StageJob:
    """Return a job of one iteration of GRPO whose whole reward is a judge's score."""
    folder.mkdir()
    server = JudgeServer(url=f"{judge.url}/v1", model="m", name="judge", at_once=3)
    job = of_preset("grpo", iterations=1, microbatch_size=2)(pipeline, folder)
    inputs = {role: path for role, path in job.inputs.items() if not role.startswith("reward")}
    rewards = {"main": Reward(terms=(JudgeTerm(judge=server),))}
    return job.model_copy(update={"rewards": rewards, "inputs": inputs})


def on_two_ranks(folder: Path, job: StageJob) -> None:
    """Run the job, and assert that both ranks measure the same."""
    folder.mkdir(exist_ok=True)
    start(2, folder / "jobs", [job], eps=ADAM_EPS)
    assert result_of(job, 0) == result_of(job, 1)


def rows_of(job: StageJob) -> list[dict[str, Any]]:
    """Return the collected rows of all splits."""
    files = (job.output / f"{split}.arrow" for split in ("train", "validation", "test"))
    return [
        row for file in files for row in pa.ipc.open_file(pa.memory_map(str(file))).read_all().to_pylist()
    ]


def scores_in(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("score")}


def lines(job: StageJob) -> list[str]:
    """Return the stored answers, sorted; each is there once."""
    found = [each.line() for each in answers_in(job.scratch / ANSWERS)]
    assert len({each.asked_as for each in answers_in(job.scratch / ANSWERS)}) == len(found)
    return sorted(found)


def test_two_ranks_collect_the_scores_that_servers_give_one_process(
    pipeline: Any, tmp_path: Path, prompts: Path, servers: tuple[FakeJudge, FakeJudge]
) -> None:
    """While two ranks ask, 30 % of the requests fail."""
    alone = scored_by_servers(pipeline, tmp_path / "alone", prompts, *servers)
    expected = run_to_compare(alone)
    for server in servers:
        server.seen.questions.clear()
        server.faults.share = FAILING
    together = scored_by_servers(pipeline, tmp_path / "together", prompts, *servers)
    on_two_ranks(tmp_path / "ranks", together)
    assert result_of(together, 0).metrics == pytest.approx(expected.metrics, rel=1e-5)
    rows, others = rows_of(together), rows_of(alone)
    assert [row["response_ids"] for row in rows] == [row["response_ids"] for row in others]
    assert list(map(scores_in, rows)) == list(map(scores_in, others)), "bit by bit"
    assert len({row["score"] for row in rows}) > 20
    assert lines(together) == lines(alone)
    for server in servers:
        assert set(server.seen.questions.values()) == {1}, "nothing was asked twice"


def test_two_ranks_ask_while_they_sample(
    pipeline: Any, tmp_path: Path, servers: tuple[FakeJudge, FakeJudge]
) -> None:
    """In best of two, the first rank asks about the responses batch by batch, for two terms with equal questions."""
    judge, _ = servers
    alone = judged(tmp_path / "alone", pipeline, judge, "one", "two", at_once=3)
    alone = alone.model_copy(update={"work": resolve_work(alone.work)})
    run_to_compare(alone)
    judge.seen.questions.clear()
    judge.faults.share = FAILING
    together = judged(tmp_path / "together", pipeline, judge, "one", "two", at_once=3)
    together = together.model_copy(update={"work": resolve_work(together.work)})
    on_two_ranks(tmp_path / "ranks", together)
    assert set(judge.seen.questions.values()) == {1}
    assert lines(together) == lines(alone)
    assert last_metrics(together) == pytest.approx(last_metrics(alone), rel=2e-3, abs=2e-4)
    [found], [expected] = (read(job.scratch / JOURNAL) for job in (together, alone))
    for name in ("judge_asked", "judge_answers"):
        assert found.metrics[name] == expected.metrics[name] > 0
    assert found.metrics["judge_failed_calls"] > 0 == expected.metrics["judge_failed_calls"]


def test_two_ranks_optimise_the_rewards_that_a_judge_gives_one_process(
    pipeline: Any, tmp_path: Path, servers: tuple[FakeJudge, FakeJudge]
) -> None:
    """In GRPO the scores decide the advantages, so the update is that of one process only if the rewards are."""
    judge, _ = servers
    alone = optimised_by_a_judge(pipeline, tmp_path / "alone", judge)
    run_to_compare(alone)
    judge.seen.questions.clear()
    judge.faults.share = FAILING
    together = optimised_by_a_judge(pipeline, tmp_path / "together", judge)
    on_two_ranks(tmp_path / "ranks", together)
    assert set(judge.seen.questions.values()) == {1}
    assert lines(together) == lines(alone)
    [found, *_], [expected, *_] = (read(job.scratch / JOURNAL) for job in (together, alone))
    for name in ("judge_asked", "score_mean"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-6), name
    assert found.metrics["judge_failed_calls"] > 0 == expected.metrics["judge_failed_calls"]
    assert last_metrics(together) == pytest.approx(last_metrics(alone), rel=2e-3, abs=2e-4)


def test_two_ranks_share_the_questions_to_a_judging_model(pipeline: Any, tmp_path: Path) -> None:
    alone = scored_by_a_model(pipeline, tmp_path / "alone")
    expected = run_to_compare(alone)
    together = scored_by_a_model(pipeline, tmp_path / "together")
    on_two_ranks(tmp_path / "ranks", together)
    rows, others = rows_of(together), rows_of(alone)
    for row, other in zip(rows, others, strict=True):
        assert scores_in(row) == pytest.approx(scores_in(other), abs=1e-4)
    assert len({row["score"] for row in rows}) > 20
    assert result_of(together, 0).metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)
    asked = [{each.question for each in answers_in(job.scratch / ANSWERS)} for job in (alone, together)]
    assert asked[0] == asked[1] and len(lines(together)) == len(asked[1])


def test_two_ranks_learn_from_a_served_teacher_what_one_process_learns(pipeline: Any, tmp_path: Path) -> None:
    with serving(pipeline.folder("sft")) as [server]:
        server.model = load_policy(pipeline.folder("sft")).eval()
        alone = served_job(pipeline, tmp_path / "alone", server.url, iterations=1)
        expected = run_to_compare(alone)
        server.seen.read.clear()
        server.faults.failing_share = 1 / 3
        together = served_job(pipeline, tmp_path / "together", server.url, iterations=1)
        on_two_ranks(tmp_path / "ranks", together)
    answered = list(map(tuple, server.seen.read))
    assert len(answered) == len(set(answered)) > 20, "nothing was asked twice"
    assert server.seen.num_failed > 5
    found = result_of(together, 0).metrics
    assert found == pytest.approx(expected.metrics, rel=2e-3, abs=2e-3, nan_ok=True)
    assert last_metrics(together)["reverse_kl"] == pytest.approx(last_metrics(alone)["reverse_kl"], abs=1e-4)
