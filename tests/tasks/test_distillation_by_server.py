"""Distillation with a teacher behind a server has the losses of the same teacher in process, whatever fails on the way."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.support.every import every
from tests.support.fake_vllm_server import FakeServer, serving
from tests.tasks.distillation_jobs import VERIFIER, job_in
from tests.tasks.kills import killed_in
from tests.tasks.test_stages_by_oracle import last_weights
from vantage.ledger.journal import read
from vantage.models.folders import load_policy, load_tokenizer
from vantage.schemas.metric_names import LEAD_SHARE
from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import estimated_metric_names
from vantage.schemas.records.stored_answers import question_digest
from vantage.tasks.distillation import run
from vantage.tasks.rewards import answer_file, asking
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.rewards.asking import JudgeRefused, JudgeUnavailable, Question
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.training.scratch import ANSWERS, JOURNAL
from vantage.tasks.updates.teacher_server import LogProbs, ServedTeacher

SHORT = {"kl": "sampled", "iterations": 2, "validation_samples": 8, "test_samples": 16, "reward": VERIFIER}


@pytest.fixture(scope="module")
def server(pipeline: Any) -> Iterator[FakeServer]:
    with serving(pipeline.folder("sft")) as [served]:
        served.model = load_policy(pipeline.folder("sft")).eval()
        yield served


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget all open files of answers, as a new process does."""
    monkeypatch.setattr(asking, "LONGEST_PAUSE", 0.05)
    answer_file._opened.cache_clear()
    return answer_file._opened.cache_clear


def served_job(
    pipeline: Any, folder: Path, url: str, *, model: str = "served", patience: float = 20.0, **changes: Any
) -> StageJob:
    """Return a job whose teacher is behind the server."""
    teacher = TeacherServer(url=url, model=model, request_seconds=5.0, patience_seconds=patience)
    job = job_in(pipeline, folder, **SHORT | changes)
    work = job.work.model_copy(update={"teacher": None, "teacher_server": teacher})
    inputs = {role: path for role, path in job.inputs.items() if role != "teacher"}
    return job.model_copy(update={"work": work, "inputs": inputs})


@dataclass(frozen=True)
class Done:
    """A stage that has ended."""

    job: StageJob
    result: StageResult

    @property
    def curve(self) -> list[float]:
        """``reverse_kl`` of each iteration."""
        return [entry.metrics["reverse_kl"] for entry in read(self.job.scratch / JOURNAL)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of the student after the last step; the kept one may be that of before training."""
        return last_weights(self.job, "policy")

    def assert_has_same_weights(self, other: "Done") -> None:
        """Assert that both have the same bits after the last step."""
        assert self.weights.keys() == other.weights.keys()
        for name, weights in self.weights.items():
            assert torch.equal(weights, other.weights[name]), name


@pytest.fixture(scope="module")
def held(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return the result of the stage with the teacher in its process."""
    job = job_in(pipeline, tmp_path_factory.mktemp("held"), **SHORT)
    return Done(job, run(job))


@pytest.fixture(scope="module")
def asked(pipeline: Any, server: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return the result of the stage with the same teacher behind a server that never fails."""
    job = served_job(pipeline, tmp_path_factory.mktemp("served"), server.url)
    return Done(job, run(job))


def test_a_served_teacher_gives_the_losses_of_one_in_process(held: Done, asked: Done) -> None:
    assert len(asked.curve) == 2 and asked.curve[0] > 0.1
    assert asked.curve == pytest.approx(held.curve, abs=1e-5)
    start = load_file(held.job.inputs["init"] / "model.safetensors")
    moved = max((held.weights[name] - weights).abs().max().item() for name, weights in start.items())
    assert moved > 1e-3
    for name, weights in held.weights.items():
        torch.testing.assert_close(asked.weights[name], weights, atol=moved / 100, rtol=0)
    measured = {name: value for name, value in held.result.metrics.items() if "teacher_" not in name}
    assert asked.result.metrics == pytest.approx(measured, abs=1e-5)


def test_the_scores_of_a_served_teacher_are_not_measured(asked: Done) -> None:
    has = settings_of({"kind": "distillation", "teacher_server": {}})
    assert asked.result.uncertainty.keys() == estimated_metric_names("distillation", has=has)
    assert not {"teacher_score", LEAD_SHARE} & asked.result.metrics.keys()


def test_calls_that_fail_change_no_weight_and_no_answer_is_asked_for_twice(
    asked: Done,
    pipeline: Any,
    server: FakeServer,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
) -> None:
    """Every third request fails: 500, a closed connection, or an answer without log-probabilities. Then a kill and another attempt."""
    server.seen.read.clear()
    server.faults.failing_share = 1 / 3
    before = server.seen.num_failed
    try:
        with pytest.MonkeyPatch.context() as patched, killed_in(1, patched):
            run(served_job(pipeline, tmp_path, server.url, checkpoint_every=1))
        answer_file._opened.cache_clear()
        job = served_job(pipeline, tmp_path, server.url, checkpoint_every=1)
        assert run(job) == asked.result
    finally:
        server.faults.failing_share = 0.0
    assert server.seen.num_failed - before > 20
    assert len(server.seen.read) == len(set(map(tuple, server.seen.read))) > 40
    assert contents(job.output) == contents(asked.job.output)
    Done(job, asked.result).assert_has_same_weights(asked)
    assert lines(job) == lines(asked.job)


def lines(job: StageJob) -> list[str]:
    """Return the stored answers, sorted."""
    return sorted(answer.line() for answer in answers_in(job.scratch / ANSWERS))


@pytest.mark.slow
def test_a_rerun_reads_the_stored_answers_and_asks_no_server(
    asked: Done, pipeline: Any, tmp_path: Path, contents: Callable[[Path], dict[str, bytes]]
) -> None:
    job = served_job(pipeline, tmp_path, "http://127.0.0.1:9")
    job.scratch.mkdir(parents=True, exist_ok=True)
    (job.scratch / ANSWERS).write_bytes((asked.job.scratch / ANSWERS).read_bytes())
    assert run(job) == asked.result
    assert contents(job.output) == contents(asked.job.output)
    Done(job, asked.result).assert_has_same_weights(asked)


def test_an_answer_has_the_log_probabilities_of_the_response_alone(asked: Done, server: FakeServer) -> None:
    """The stored log-probabilities equal those of one pass of the model in float64 over each stored question."""
    kept = [answer for answer in answers_in(asked.job.scratch / ANSWERS) if "response_ids" in answer.asked]
    model = server.model.double()
    try:
        for answer in kept[:5]:
            prompt, response = answer.asked["prompt_ids"], answer.asked["response_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
            assert json.loads(answer.answer) == pytest.approx(expected.tolist(), abs=1e-5)
            assert answer.question_tokens == len(prompt) + len(response)
    finally:
        server.model.float()


def test_a_dead_server_ends_the_stage_before_it_trains(pipeline: Any, tmp_path: Path) -> None:
    job = served_job(pipeline, tmp_path, "http://127.0.0.1:9", patience=0.2)
    with pytest.raises(
        JudgeUnavailable, match=r"stages\.student\.teacher_server\.url=http.* does not answer"
    ):
        run(job)
    assert not list(job.output.iterdir())


def test_a_server_without_the_model_is_refused(pipeline: Any, server: FakeServer, tmp_path: Path) -> None:
    teacher = ServedTeacher(served_job(pipeline, tmp_path, server.url, model="another"))
    with pytest.raises(JudgeRefused, match="answered 404: .*'another' does not exist"):
        teacher._answers(LogProbs(), [teacher._question([1, 2], [3])])


def test_a_server_that_reads_texts_otherwise_is_refused(
    pipeline: Any, server: FakeServer, tmp_path: Path
) -> None:
    """Two ids change places, which the fixed texts need not contain."""
    job = served_job(pipeline, tmp_path, server.url)
    own = load_tokenizer(job.inputs["init"])
    state = json.loads(own.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    changed = load_tokenizer(job.inputs["init"])
    changed._tokenizer = Tokenizer.from_str(json.dumps(state))
    with pytest.raises(
        TokenizersDiffer,
        match=r"teacher_server\.model=served has another tokenizer than init='model': .* use a teacher of the student's family",
    ):
        ServedTeacher(job).prove(changed)


def test_a_server_without_a_tokenizer_is_refused(pipeline: Any, server: FakeServer, tmp_path: Path) -> None:
    job = served_job(pipeline, tmp_path, server.url)
    server.faults.has_no_tokenizer = True
    try:
        with pytest.raises(JudgeRefused, match="answered 400: .*no tokenizer.*; start the teacher with"):
            ServedTeacher(job).prove(load_tokenizer(job.inputs["init"]))
    finally:
        server.faults.has_no_tokenizer = False


def question(prompt: list[int], response: list[int]) -> Question:
    asked = {"model": "m", "tokenizer": "", "prompt_ids": prompt, "response_ids": response}
    return Question(asked, question_digest(asked), 0)


@every(
    "found",
    [
        [None],
        [None, {"2": {"logprob": -1.0}}],
        [None, {"7": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}],
        [None, {"7": {"logprob": -1.0}}, {"3": {"logprob": 0.5}}],
        [None, {"7": {"logprob": -1.0}}, {"3": {"logprob": "NaN"}}],
        None,
    ],
)  # fmt: skip
def test_an_answer_without_one_number_for_each_token_is_asked_for_again(found: Any) -> None:
    """The errors are those that ``Asking`` takes for a failed call."""
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        LogProbs().replies({"choices": [{"prompt_logprobs": found}]}, questions=[question([1, 7], [3])])


def test_log_probabilities_are_read_by_the_tokens_id() -> None:
    """vLLM may add the likeliest token beside the one that is asked for."""
    found = [None, {"7": {"logprob": -9.0}}, {"5": {"logprob": -0.1}, "3": {"logprob": -2.5}}]
    [reply] = LogProbs().replies({"choices": [{"prompt_logprobs": found}]}, questions=[question([1, 7], [3])])
    assert json.loads(reply.text) == [-2.5]
