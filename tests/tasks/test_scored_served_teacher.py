"""A teacher behind a server that also samples: its score and the share of its lead come from responses that are kept like answers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm_server import FakeServer, serving
from tests.tasks.distillation_jobs import VERIFIER
from tests.tasks.test_distillation_by_server import Done, fresh, lines, served_job
from vantage.models.folders import load_policy, load_tokenizer
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.metric_names import LEAD_SHARE
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.recipe.rewards import MissingEos
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import estimated_metric_names
from vantage.tasks.data import arithmetic
from vantage.tasks.distillation import run
from vantage.tasks.rewards import answer_file
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.rewards.asking import Question
from vantage.tasks.training.scratch import ANSWERS
from vantage.tasks.updates.teacher_server import Sampled

__all__ = ["fresh"]

RECIPE = """
recipe: taught
model: {source: "builtin:tiny"}
GENERATION
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  prompts: {source: "builtin:arithmetic/prompts"}
rewards: {main: {terms: [{verifier: arithmetic}]}}
stages:
  sft: {kind: sft, data: demonstrations}
  student:
    kind: distillation
    init: sft
    teacher_server: {url: "http://teacher:8000", model: large, SAMPLED}
    kl: sampled
    prompts: prompts
    reward: main
    gate: {metric: teacher_lead_share, at_least: 0.8}
"""


@pytest.fixture(scope="module")
def server(pipeline: Any) -> Iterator[FakeServer]:
    """Serve a teacher that ends each response after two tokens at most."""
    with serving(pipeline.folder("sft")) as [served]:
        served.model = load_policy(pipeline.folder("sft")).eval()
        whole = served.completed

        def short(body: dict[str, Any]) -> dict[str, Any]:
            answer, ends = whole(body), body["stop_token_ids"]
            [chosen] = answer["choices"]
            chosen["token_ids"] = [*(each for each in chosen["token_ids"][:2] if each not in ends), ends[0]]
            chosen["finish_reason"] = "stop"
            return answer

        served.completed = short  # type: ignore[method-assign]
        yield served


def plain_job(pipeline: Any, folder: Path, url: str) -> StageJob:
    """Return a job whose reward is 1 for a right response, less 1 for one without an end."""
    job = served_job(pipeline, folder, url, iterations=1, checkpoint_every=1)
    reward = VERIFIER.model_copy(update={"missing_eos": MissingEos(subtract=1.0)})
    return job.model_copy(update={"rewards": {"main": reward}})


def scored_job(pipeline: Any, folder: Path, url: str) -> StageJob:
    """Return a job whose teacher's server also samples."""
    job = plain_job(pipeline, folder, url)
    teacher = job.work.teacher_server.model_copy(update={"sampled": True})
    return job.model_copy(update={"work": job.work.model_copy(update={"teacher_server": teacher})})


@pytest.fixture(scope="module")
def scored(pipeline: Any, server: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Done:
    job = scored_job(pipeline, tmp_path_factory.mktemp("scored"), server.url)
    return Done(job, run(job))


def responses_of(job: StageJob) -> list[dict[str, Any]]:
    """Return the stored questions for responses, each with its answer."""
    kept = (each for each in answers_in(job.scratch / ANSWERS) if "end_ids" in each.asked)
    return [{**each.asked, **json.loads(each.answer)} for each in kept]


def test_the_score_is_that_of_the_stored_responses(scored: Done, server: FakeServer) -> None:
    """The stored ids are decoded and judged again with their prompts, and the share is computed by its formula."""
    tokenizer = load_tokenizer(scored.job.inputs["init"])
    kept = responses_of(scored.job)
    assert len(kept) == scored.job.work.test_samples == 16
    scores = []
    for each in kept:
        prompt = tokenizer.decode(each["prompt_ids"], skip_special_tokens=True)
        ids = each["ids"][:-1] if each["ended"] else each["ids"]
        right = arithmetic.verify(prompt, tokenizer.decode(ids), dial=arithmetic.DIALS["arithmetic"])
        scores.append(float(right) - (not each["ended"]))
    metrics = scored.result.metrics
    assert metrics["teacher_score"] == pytest.approx(sum(scores) / len(kept), abs=1e-6)
    assert {each["seed"] for each in kept} == {seed for _, seed in server.seen.completed}
    assert len({each["seed"] for each in kept}) == len(kept)
    gain, lead = (metrics[name] - metrics["initial_score"] for name in ("test_score", "teacher_score"))
    assert lead > 0, "the teacher has something to teach"
    assert metrics[LEAD_SHARE] == pytest.approx(gain / lead, abs=1e-6)


@pytest.mark.slow
def test_sampling_from_the_teacher_changes_no_weight(
    scored: Done, pipeline: Any, server: FakeServer, tmp_path: Path
) -> None:
    job = plain_job(pipeline, tmp_path, server.url)
    plain = Done(job, run(job))
    scored.assert_has_same_weights(plain)
    assert scored.curve == plain.curve
    of_teacher = {"teacher_score", LEAD_SHARE}
    kept = {name: value for name, value in scored.result.metrics.items() if name not in of_teacher}
    assert kept == plain.result.metrics
    has = settings_of({"kind": "distillation", "teacher_server": {"sampled": True}})
    assert scored.result.uncertainty.keys() == estimated_metric_names("distillation", has=has)


@pytest.mark.slow
def test_calls_that_fail_change_nothing_and_a_rerun_asks_nothing(
    scored: Done, pipeline: Any, server: FakeServer, tmp_path: Path, fresh: Callable[[], None]
) -> None:
    server.seen.completed.clear()
    server.faults.failing_share = 1 / 3
    try:
        job = scored_job(pipeline, tmp_path / "failing", server.url)
        assert run(job) == scored.result
    finally:
        server.faults.failing_share = 0.0
    assert lines(job) == lines(scored.job)
    assert len(server.seen.completed) == len(set(server.seen.completed)) == 16
    answer_file._opened.cache_clear()
    again = scored_job(pipeline, tmp_path / "again", "http://127.0.0.1:9")
    again.scratch.mkdir(parents=True, exist_ok=True)
    (again.scratch / ANSWERS).write_bytes((scored.job.scratch / ANSWERS).read_bytes())
    assert run(again) == scored.result


@pytest.mark.parametrize(
    "choice, said",
    [
        ({"token_ids": [7, 2], "finish_reason": "length"}, "ended for the reason 'length' after 2 tokens"),
        ({"token_ids": [7, 8], "finish_reason": "stop"}, "ended for the reason 'stop' after 2 tokens"),
        ({"token_ids": [7], "finish_reason": "abort"}, "ended for the reason 'abort'"),
        ({"token_ids": [7, 8], "finish_reason": "length"}, "has 2 of 3 tokens and no end"),
        ({"token_ids": [], "finish_reason": "stop"}, "after 0 tokens"),
        ({"finish_reason": "stop"}, "token_ids"),
        ({"token_ids": None, "finish_reason": "stop"}, "is not iterable"),
    ],
)
def test_an_answer_that_is_no_whole_response_is_asked_for_again(choice: dict[str, Any], said: str) -> None:
    asked = Question({"end_ids": [2], "max_tokens": 3, "prompt_ids": [1]}, "d", 0)
    with pytest.raises((ValueError, KeyError, TypeError), match=said):
        Sampled().replies({"choices": [choice]}, questions=[asked])
    [whole] = Sampled().replies(
        {"choices": [{"token_ids": [7, 8, 9], "finish_reason": "length"}]}, questions=[asked]
    )
    assert json.loads(whole.text) == {"ids": [7, 8, 9], "ended": False}


def test_a_last_token_that_ends_a_response_of_the_limit_may_have_either_reason() -> None:
    """Some versions of vLLM look at the limit first, and would give the same reason however often they are asked."""
    asked = Question({"end_ids": [2], "max_tokens": 3, "prompt_ids": [1]}, "d", 0)
    for reason in ("stop", "length"):
        choice = {"token_ids": [7, 8, 2], "finish_reason": reason}
        [whole] = Sampled().replies({"choices": [choice]}, questions=[asked])
        assert json.loads(whole.text) == {"ids": [7, 8, 2], "ended": True}


def test_a_gate_on_the_lead_needs_responses_of_the_server() -> None:
    text = RECIPE.replace("GENERATION", "")
    parse_recipe(text.replace("SAMPLED", "sampled: true"))
    with pytest.raises(RecipeError, match=r"set teacher_server\.sampled: true"):
        parse_recipe(text.replace("SAMPLED", "at_once: 4"))
    stops = RECIPE.replace("GENERATION", 'generation: {stop: ["END"]}').replace("SAMPLED", "sampled: true")
    with pytest.raises(RecipeError, match=r"responses end at tokens alone, and generation\.stop=\['END'\]"):
        parse_recipe(stops)


def test_a_server_that_does_not_sample_is_written_as_before() -> None:
    plain = TeacherServer(url="http://a:1", model="m")
    assert plain.in_key() == {"model": "m"}
    assert TeacherServer(url="http://a:1", model="m", sampled=True).in_key() == {
        "model": "m",
        "sampled": True,
    }
