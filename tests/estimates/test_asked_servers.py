"""An estimate counts questions to judges and reward servers as they are counted by hand."""

import pytest
import yaml

from vantage.estimates.asked_servers import Asked, summed
from vantage.estimates.recipe_estimate import estimate_recipe
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.served_scores import JudgeServer, Price, RewardServer

TEXT = """
recipe: judged
seed: 1
model: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 48, max_response_tokens: 24}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 64, split: {validation: 16, test: 8}}
rewards:
  main:
    terms:
    - judge: {url: "http://127.0.0.1:1/v1", model: m, criteria: {right: "right?", short: "short?"}, max_answer_tokens: 100,
              price: {question: 2.0, answer: 10.0}, requests_per_minute: 120}
    - http: {url: "http://127.0.0.1:1", version: "1", batch: 10}
stages:
  policy: {kind: policy_optimization, algorithm: {preset: grpo, samples_per_prompt: 4}, init: model, reward: main, prompts: prompts,
           iterations: 5, batch_size: 32, minibatch_size: 16, validate_every: 2, validation_samples: 16, learning_rate: 1e-4}
  collected: {kind: rollout_collection, policy: model, prompts: prompts, reward: main, samples_per_prompt: 2, batch_size: 16}
"""


def asked(name: str, *, watch: str = "") -> dict[str, Asked]:
    plain = yaml.safe_load(TEXT)
    if watch:
        plain["rewards"]["second"] = {
            "terms": [{"judge": {"url": "http://127.0.0.1:1/v1", "model": "other", "name": "second"}}]
        }
        plain["stages"]["policy"]["watch"] = {"judge": {"reward": watch}}
    found = estimate_recipe(parse_recipe(yaml.safe_dump(plain)), gpu="h100")
    [stage] = [each for each in found.stages if each.name == name]
    json = stage.as_json(None)["asked"]
    assert [each["questions"] for each in json] == [each.questions for each in stage.workload.asked]
    return {each.server.name: each for each in stage.workload.asked}


def test_every_scored_response_is_counted() -> None:
    """The stage scores 5 rollouts of 32, 4 validations of 16 (before the first iteration, after the second, the fourth
    and the last) and a test of 16."""
    found = asked("policy")
    assert found["judge"].responses == found["http"].responses == 5 * 32 + 4 * 16 + 16 == 240
    assert (found["judge"].requests, found["http"].requests) == (240, 24)
    assert found["judge"].least_seconds == 120.0
    assert found["http"].question_tokens is found["http"].cost is None


def test_a_watch_asks_about_the_validations_alone() -> None:
    found = asked("policy", watch="second")
    assert found["judge"].responses == 240
    assert found["second"].responses == 4 * 16


def test_a_collection_asks_about_every_response() -> None:
    """The collection has two responses to each of 64 + 16 + 8 prompts."""
    assert asked("collected")["judge"].responses == 2 * (64 + 16 + 8)


def test_the_tokens_and_the_cost_by_hand() -> None:
    judge = JudgeServer(
        url="http://127.0.0.1:1", model="m", prompt="{prompt} {response} right short!", criteria={"right": "yes?", "short": "yes?"},
        max_answer_tokens=100, price=Price(question=2.0, answer=10.0),
    )  # fmt: skip
    found = Asked(server=judge, responses=1000.0, prompt=20.0, response=30.0)
    # 32 characters of the prompt and 2 · 4 of the criteria are 10 tokens; two lines of 8 tokens
    assert found.question_tokens == 1000 * (10 + 20 + 30)
    assert found.answer_tokens == (16_000, 100_000)
    assert found.cost == pytest.approx((60_000 * 2e-6 + 16_000 * 1e-5, 60_000 * 2e-6 + 100_000 * 1e-5))
    thinking = judge.model_copy(update={"request": {"max_completion_tokens": 400}})
    found = Asked(server=thinking, responses=1000.0, prompt=20.0, response=30.0)
    assert found.answer_tokens == (16_000, 400_000)
    compared = JudgeServer(
        url="http://127.0.0.1:1", model="m", against="answer", prompt="{prompt}{first}{second}"
    )
    found = Asked(server=compared, responses=10.0, prompt=20.0, response=30.0)
    assert (found.questions, found.cost) == (20, None)
    assert found.question_tokens == 20 * (23 / 4 + 20 + 2 * 30)


def test_entries_of_one_server_and_one_kind_of_text_are_added() -> None:
    server = RewardServer(url="http://127.0.0.1:1", version="1")
    one, other = (Asked(server=server, responses=3.0, prompt=prompt, response=5.0) for prompt in (7.0, 8.0))
    assert [each.responses for each in summed([one, other, one])] == [6.0, 3.0]


def test_judges_of_one_name_are_entries_of_their_own() -> None:
    """The rewards of a stage and of its watch may give different judges the same name."""
    plain = yaml.safe_load(TEXT)
    second = {"url": "http://127.0.0.1:1/v1", "model": "m", "price": {"question": 4.0, "answer": 20.0}}
    plain["rewards"]["second"] = {"terms": [{"judge": second}]}
    plain["stages"]["policy"]["watch"] = {"judge": {"reward": "second"}}
    found = estimate_recipe(parse_recipe(yaml.safe_dump(plain)), gpu="h100")
    [stage] = [each for each in found.stages if each.name == "policy"]
    judges = [each for each in stage.workload.asked if each.server.name == "judge"]
    assert sorted(each.responses for each in judges) == [4 * 16, 240]
    prices = {each.responses: each.server.price.question for each in judges}
    assert prices == {240: 2.0, 4 * 16: 4.0}


def test_a_served_teacher_is_asked_about_every_rollout_and_the_last_test() -> None:
    """The teacher is asked about 3 rollouts of 32 and 8 test responses. It takes no memory, and samples nothing."""
    plain = yaml.safe_load(TEXT)
    plain["rewards"] = {"main": {"terms": [{"verifier": "arithmetic"}]}}
    student = {
        "kind": "distillation",
        "init": "model",
        "kl": "sampled",
        "reward": "main",
        "prompts": "prompts",
    }
    sizes = {
        "iterations": 3,
        "batch_size": 32,
        "minibatch_size": 16,
        "validation_samples": 16,
        "test_samples": 8,
    }
    server = {"url": "http://127.0.0.1:1", "model": "large", "requests_per_minute": 60}
    plain["stages"] = {"student": {**student, **sizes, "teacher_server": server}}
    [stage] = estimate_recipe(parse_recipe(yaml.safe_dump(plain)), gpu="h100").stages[-1:]
    [found] = stage.workload.asked
    assert (found.server.name, found.responses, found.requests) == ("teacher", 3 * 32 + 8, 104)
    assert found.least_seconds == 104.0 and found.question_tokens is None
    parts = (*stage.workload.networks, *stage.workload.passes, *stage.workload.samplings)
    assert {each.role for each in parts} == {"policy"}
    plain["stages"]["student"]["teacher_server"] = server | {"sampled": True}
    [stage] = estimate_recipe(parse_recipe(yaml.safe_dump(plain)), gpu="h100").stages[-1:]
    [found] = stage.workload.asked
    assert found.responses == 3 * 32 + 8 + 8, "and about 8 responses of its own"


def test_a_held_teacher_of_sampled_tokens_reads_each_rollout_once() -> None:
    plain = yaml.safe_load(TEXT)
    plain["rewards"] = {"main": {"terms": [{"verifier": "arithmetic"}]}}
    plain["models"] = {"large": {"source": "builtin:nano"}}
    student = {
        "kind": "distillation",
        "init": "model",
        "teacher": "large",
        "reward": "main",
        "prompts": "prompts",
    }
    sizes = {"iterations": 3, "batch_size": 32, "minibatch_size": 16, "epochs": 2, "test_samples": 8}
    plain["stages"] = {"student": {**student, **sizes, "kl": "sampled"}}
    [stage] = estimate_recipe(parse_recipe(yaml.safe_dump(plain)), gpu="h100").stages[-1:]
    passes = [(each.times, each.sequences.count) for each in stage.workload.passes if each.role == "teacher"]
    assert sorted(passes) == [(1, 8), (3, 32)]
