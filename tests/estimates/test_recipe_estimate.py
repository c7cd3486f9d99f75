"""The estimate of whole recipes has every kind of stage, names what its numbers rest on, and is printed by the command."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.estimates.layouts import Layout
from vantage.estimates.recipe_estimate import RecipeEstimate, StageEstimate, estimate_recipe
from vantage.estimates.token_counts import count_data, token_counter
from vantage.estimates.workload import Workload
from vantage.models.packing import first_fit_decreasing
from vantage.schemas.kinds import STAGES
from vantage.schemas.loading.recipe_file import load_recipe, parse_recipe
from vantage.tasks.training.data_order import DataOrder

EVERY_KIND = """\
recipe: every_kind
model: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 32, max_response_tokens: 64}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 2000}
  preferences: {source: "builtin:arithmetic/preferences", rows: 1000}
  labelled: {source: "builtin:arithmetic/labelled_responses", rows: 1000}
  prompts: {source: "builtin:arithmetic/prompts", rows: 500, split: {validation: 64, test: 50}}
rewards: {main: {terms: [{model: reward}]}}
stages:
  sft: {kind: sft, data: demonstrations, batch_size: 32}
  reward: {kind: reward_model, init: sft, data: preferences, batch_size: 16}
  value:
    {kind: value_pretraining, policy: sft, init: reward, reward: main, prompts: prompts, iterations: 3,
     batch_size: 64, minibatch_size: 16, epochs: 2}
  policy:
    {kind: policy_optimization, algorithm: vapo, init: sft, critic: value, reward: main, prompts: prompts,
     iterations: 4, batch_size: 64, minibatch_size: 32}
  critic_free:
    {kind: policy_optimization, algorithm: {preset: grpo, samples_per_prompt: 4}, init: sft, reward: main,
     prompts: prompts, iterations: 4, batch_size: 64, minibatch_size: 32}
  raft: {kind: best_of_n, init: sft, reward: main, prompts: prompts, iterations: 2, minibatch_size: 8}
  distilled:
    {kind: distillation, init: sft, teacher: dpo, reward: main, prompts: prompts, iterations: 3, batch_size: 64,
     minibatch_size: 32, epochs: 2, test_samples: 40, validation_samples: 30}
  pairs: {kind: preference_collection, policy: sft, prompts: prompts, judge: {reward: main}, batch_size: 32}
  dpo: {kind: dpo, init: sft, data: pairs, batch_size: 32}
  simpo: {kind: dpo, loss: simpo, beta: 2.0, target_margin: 1.0, init: sft, data: pairs, batch_size: 32}
  kto: {kind: kto, init: sft, data: labelled, batch_size: 32}
  collected:
    {kind: rollout_collection, policy: sft, prompts: prompts, reward: main, samples_per_prompt: 4,
     held_out_samples_per_prompt: 2, batch_size: 32}
  checked: {kind: reward_evaluation, reward_model: reward, data: preferences}
  evaluation:
    {kind: evaluation, candidate: policy, baseline: sft, judge: {reward: main}, prompts: prompts,
     samples_per_prompt: 2}
"""


@pytest.fixture(scope="module")
def every_kind() -> RecipeEstimate:
    return estimate_recipe(parse_recipe(EVERY_KIND), gpu="h100", price=2.0)


def stage(found: RecipeEstimate, name: str) -> StageEstimate:
    return next(each for each in found.stages if each.name == name)


def weights(found: RecipeEstimate, name: str) -> dict[str, tuple[int, bool]]:
    return {each.role: (each.weights, each.is_trained) for each in stage(found, name).workload.networks}


def test_losses_without_a_reference_hold_none_and_pass_none(every_kind: RecipeEstimate) -> None:
    assert weights(every_kind, "dpo").keys() == weights(every_kind, "kto").keys() == {"policy", "reference"}
    assert weights(every_kind, "simpo").keys() == {"policy"}
    passes = {name: stage(every_kind, name).workload.passes for name in ("dpo", "simpo", "kto")}
    assert {each.role for each in passes["simpo"]} == {"policy"}
    of_policy = [each for each in passes["dpo"] if each.role == "policy"]
    assert list(passes["simpo"]) == of_policy, "the same rows go through the policy"


def test_kto_reads_its_minibatch_a_second_time_for_the_reference_point(every_kind: RecipeEstimate) -> None:
    found = stage(every_kind, "kto").workload
    steps = found.counts["optimizer_steps"]
    trained, mismatched, of_reference = found.passes[:3]
    assert (trained.does, trained.role, trained.times) == ("train", "policy", steps)
    assert (mismatched.does, mismatched.role, mismatched.times) == ("score", "policy", steps)
    assert (of_reference.role, of_reference.times) == ("reference", 2 * steps)


def test_a_distillation_reads_its_teacher_in_each_step_and_measures_it_once(
    every_kind: RecipeEstimate,
) -> None:
    """The stage has 3 iterations of 2 epochs of 2 minibatches. It samples 3 rollouts, 2 validations, and 40 test
    responses of each of the teacher, the student before training and the student after it; the reward scores all of
    them."""
    found = stage(every_kind, "distilled").workload
    steps = 3 * 2 * 2
    assert found.counts["optimizer_steps"] == steps
    assert {each.role: each.is_trained for each in found.networks} == {
        "policy": True, "teacher": False, "reward": False,
    }  # fmt: skip
    passes = [(each.role, each.does, each.times, each.sequences.count) for each in found.passes]
    assert ("policy", "train", steps, 32) in passes and ("teacher", "score", steps, 32) in passes
    assert ("policy", "score", 1, 40) in passes and ("teacher", "score", 1, 40) in passes
    sampled = [(each.role, each.times * each.count) for each in found.samplings]
    assert [count for role, count in sampled if role == "teacher"] == [40]
    assert sum(count for role, count in sampled if role == "policy") == 3 * 64 + 2 * 30 + 2 * 40
    scored = sum(each.times * each.sequences.count for each in found.passes if each.role == "reward")
    assert scored == sum(count for _, count in sampled), "whatever is sampled is scored"


def test_every_kind_of_stage_is_estimated(every_kind: RecipeEstimate) -> None:
    texts_in_files = {kind.name for kind in STAGES.values() if kind.benchmarks}  # a note reports this
    computes_nothing = {"prompt_selection"}
    assert {each.kind for each in every_kind.stages} == STAGES.keys() - texts_in_files - computes_nothing
    for each in every_kind.stages:
        assert each.fits and each.seconds > 0 and each.flops > 0 and each.memory.peak > 0, each.name


def test_a_stage_holds_its_networks(every_kind: RecipeEstimate) -> None:
    language, scalar = 669_312, 669_312 + 128  # a tied head: the trunk is the whole model
    assert weights(every_kind, "sft") == {"policy": (language, True)}
    assert weights(every_kind, "reward") == {"reward": (scalar, True)}
    assert weights(every_kind, "value") == {
        "policy": (language, False), "critic": (scalar, True), "reward": (scalar, False),
    }  # fmt: skip
    assert weights(every_kind, "policy") == {
        "policy": (language, True), "reference": (language, False), "critic": (scalar, True),
        "reward": (scalar, False),
    }  # fmt: skip
    assert "critic" not in weights(every_kind, "critic_free")
    memory = stage(every_kind, "policy").memory
    assert memory.weights == 4 * (2 * language + 2 * scalar)
    assert memory.optimizer == 8 * (language + scalar)
    assert memory.gradients == 4 * (language + scalar)


def test_what_is_sampled_ahead_is_sampled_from_a_copy() -> None:
    plain, ahead = (
        stage(
            estimate_recipe(
                parse_recipe(EVERY_KIND, overrides=[f"stages.policy.rollout.ahead={each}"]), gpu="h100"
            ),
            "policy",
        ).memory
        for each in (0, 1)
    )
    assert ahead.weights == plain.weights + 4 * 669_312
    assert (ahead.optimizer, ahead.gradients) == (plain.optimizer, plain.gradients)


def test_responses_and_steps_are_those_of_the_loops(every_kind: RecipeEstimate) -> None:
    assert stage(every_kind, "policy").workload.counts["optimizer_steps"] == 4 * 2
    assert stage(every_kind, "value").workload.counts["optimizer_steps"] == 3 * 2 * 4
    assert stage(every_kind, "raft").workload.counts["optimizer_steps"] == 2 * (256 // 8 // 8)
    assert stage(every_kind, "evaluation").workload.counts["responses"] == 2 * (50 * 2 + 50)
    assert stage(every_kind, "pairs").workload.counts["responses"] == 2 * (500 + 64 + 50)
    assert stage(every_kind, "collected").workload.counts["responses"] == 4 * 500 + 2 * (64 + 50)


@pytest.mark.parametrize(("epochs", "batch_size"), [(1.0, 64), (0.3, 7), (2.5, 33)])
def test_optimizer_steps_are_those_of_the_data_order(epochs: float, batch_size: int) -> None:
    overrides = [f"stages.sft.epochs={epochs}", f"stages.sft.batch_size={batch_size}"]
    found = estimate_recipe(parse_recipe(EVERY_KIND, overrides=overrides), gpu="h100")
    counts = stage(found, "sft").workload.counts
    order = DataOrder(num_examples=int(counts["train_rows"]), batch_size=batch_size, seed=0)
    assert counts["optimizer_steps"] == order.num_batches(epochs)


@pytest.mark.slow
def test_the_critic_s_steps_and_the_passes_that_sao_saves_are_counted() -> None:
    """The stage has 4 iterations of 2 steps. Validation and test read the policy too, as the rollouts do."""

    def times(algorithm: str, role: str, does: str) -> float:
        overrides = [f"stages.policy.algorithm={algorithm}"]
        found = stage(estimate_recipe(parse_recipe(EVERY_KIND, overrides=overrides), gpu="h100"), "policy")
        passes = found.workload.passes
        return sum(each.times for each in passes if (each.role, each.does) == (role, does))

    waits = "{preset: sao, policy_starts_at: 1}"
    trained = {
        name: (times(name, "policy", "train"), times(name, "critic", "train")) for name in ("ppo", waits)
    }
    assert trained == {"ppo": (8, 8), waits: (6, 16)}
    assert times("ppo", "critic", "score") == 4
    assert times(waits, "critic", "score") == 4 + 3
    assert times("ppo", "policy", "score") - times(waits, "policy", "score") == 4
    assert times("ppo", "reference", "score") == times(waits, "reference", "score")
    frozen = "{preset: ppo, freeze_critic: all}"
    assert (times(frozen, "critic", "train"), times(frozen, "critic", "score")) == (0, 4)
    assert times(frozen, "policy", "train") == 8
    guarded = "{preset: ppo, trust_region_kl: 0.1}"
    steered = "{preset: ppo, kl_penalty_coef: 1.0, kl_penalty_target: 0.01}"
    selecting = "{preset: ppo, covariance: clip}"
    both = "{preset: ppo, covariance: kl, trust_region_kl: 0.1}"
    once_more = {
        name: times(name, "policy", "score") - times("ppo", "policy", "score")
        for name in (guarded, steered, selecting, both)
    }
    assert once_more == {guarded: 8, steered: 4, selecting: 8, both: 16}, "with each step, or each rollout"
    joint = "{preset: ppo, shared_trunk: true, old_logprobs: sampler}"
    assert times(joint, "policy", "score") == times("ppo", "policy", "score"), "it reads the values"


def test_what_is_measured_beside_the_score_is_counted() -> None:
    """4 iterations are validated once, at their end. At most 256 rows of a split are read, and of pairs both responses."""
    monitored = ["stages.policy.demonstrations=demonstrations", "stages.policy.preferences=preferences"]
    plain, more = (
        stage(estimate_recipe(parse_recipe(EVERY_KIND, overrides=overrides), gpu="h100"), "policy").workload
        for overrides in ([], monitored)
    )
    assert more.passes[: len(plain.passes)] == plain.passes
    added = [
        (each.role, each.does, each.times, each.sequences.count) for each in more.passes[len(plain.passes) :]
    ]
    assert added == [
        ("policy", "score", 1, 100),  # of 2,000 demonstrations, 5 % are validation rows
        ("reference", "score", 1, 100),
        ("reward", "score", 1, 2 * (256 + 50)),
    ]


@pytest.mark.slow
def test_what_was_collected_is_not_sampled_or_scored_again() -> None:
    """Value pretraining has 3 iterations of 64 responses, and reads 512 held-out responses twice. When all rollouts
    were collected beforehand, only the held-out responses pass the policy."""

    def workload(*overrides: str, name: str = "value") -> Workload:
        return stage(
            estimate_recipe(parse_recipe(EVERY_KIND, overrides=overrides), gpu="h100"), name
        ).workload

    def passes(found: Workload, role: str) -> float:
        return sum(each.times for each in found.passes if (each.role, each.does) == (role, "score"))

    offline = workload("stages.value.rollouts=collected")
    mixed = workload("stages.value.rollouts=collected", "stages.value.fresh_share=0.25")
    assert [each.times * each.count for each in offline.samplings] == []
    assert [each.times * each.count for each in mixed.samplings] == [3 * 16]
    assert (passes(offline, "policy"), passes(mixed, "policy")) == (2, 5)
    assert (passes(offline, "reward"), passes(mixed, "reward"), passes(workload(), "reward")) == (0, 3, 5)
    assert "reward" not in {each.role for each in offline.networks}
    best = workload("stages.raft.rollouts=collected", "stages.raft.samples_per_prompt=4", name="raft")
    assert passes(workload(name="raft"), "reward") - passes(best, "reward") == 2
    pairs = ["stages.dpo.data=null", "stages.dpo.rollouts=collected"]
    assert workload(*pairs, name="dpo").counts == workload(name="dpo").counts


def test_a_budget_of_positions_bounds_passes_sampling_and_memory(every_kind: RecipeEstimate) -> None:
    """Every stage but ``raft`` samples as many rows as fit with the longest; the budget of ``raft`` has room for all
    that it does.
    """
    room = {name: 10**7 if name == "raft" else 400 for name in (each.name for each in every_kind.stages)}
    overrides = [f"stages.{name}.microbatch_tokens={tokens}" for name, tokens in room.items()]
    found = estimate_recipe(parse_recipe(EVERY_KIND, overrides=overrides), gpu="h100")
    for each in found.stages:
        before = stage(every_kind, each.name)
        for part in (one.sequences for one in each.workload.passes):
            assert part.at_once * part.longest <= room[each.name], each.name
        for sampling in each.workload.samplings:
            assert sampling.at_once == min(sampling.count, room[each.name] // sampling.longest), each.name
        if each.name == "raft":
            assert each.workload == before.workload
        else:
            assert each.memory.peak < before.memory.peak, each.name
    [longest] = {one.sequences.longest for one in stage(found, "sft").workload.passes}
    in_rows = [f"stages.sft.microbatch_size={400 // longest}"]
    same = stage(estimate_recipe(parse_recipe(EVERY_KIND, overrides=in_rows), gpu="h100"), "sft")
    assert stage(found, "sft").workload == same.workload
    too_few = [f"stages.sft.microbatch_tokens={longest - 1}"]
    alone = stage(estimate_recipe(parse_recipe(EVERY_KIND, overrides=too_few), gpu="h100"), "sft")
    assert alone.workload.at_once == 1, "a row that is longer makes a pass by itself"


def test_bfloat16_halves_the_reward_model_and_shrinks_activations() -> None:
    found = {
        precision: stage(
            estimate_recipe(
                parse_recipe(EVERY_KIND, overrides=[f"stages.policy.precision={precision}"]), gpu="h100"
            ),
            "policy",
        )
        for precision in ("float32", "bfloat16")
    }
    full, half = found["float32"].memory, found["bfloat16"].memory
    assert full.weights - half.weights == 2 * (669_312 + 128)
    assert half.activations < full.activations
    assert found["bfloat16"].seconds < found["float32"].seconds


def test_a_stage_is_estimated_on_its_own_resources_unless_others_are_asked_for() -> None:
    recipe = parse_recipe(
        EVERY_KIND.replace("batch_size: 32}", "batch_size: 32, resources: {nodes: 2, gpus: 4}}", 1).replace(
            "batch_size: 16}", "batch_size: 16, resources: {gpus: 2, distributed: {strategy: fsdp2}}}", 1
        )
    )
    own = estimate_recipe(recipe, gpu="h100")
    assert [stage(own, name).layout for name in ("sft", "reward", "value")] == [
        Layout(4, 2, "ddp"),
        Layout(2, 1, "fsdp2"),
        Layout(1),
    ]
    asked = estimate_recipe(recipe, gpu="h100", gpus=8, nodes=1)
    assert {each.layout for each in asked.stages} == {Layout(8, 1, "ddp")}


def test_a_price_is_of_every_gpu(every_kind: RecipeEstimate) -> None:
    told = every_kind.as_json()
    assert told["cost"] == pytest.approx(told["seconds"] / 3600 * 2.0)
    many = estimate_recipe(parse_recipe(EVERY_KIND), gpu="h100", gpus=8, nodes=2, price=2.0).as_json()
    assert many["cost"] == pytest.approx(many["seconds"] / 3600 * 2.0 * 16)
    assert {each["layout"]["strategy"] for each in many["stages"]} == {"ddp"}


def test_a_response_is_as_long_as_the_demonstrations_or_the_limit(every_kind: RecipeEstimate) -> None:
    assert every_kind.response_basis == "responses are as long as those of data.demonstrations"
    removed = (
        '  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 2000}\n',
        "  sft: {kind: sft, data: demonstrations, batch_size: 32}\n",
    )
    without = EVERY_KIND
    for line in removed:
        without = without.replace(line, "")
    found = estimate_recipe(parse_recipe(without.replace("sft", "model")), gpu="h100")
    assert found.response_basis == "responses are as long as generation.max_response_tokens=64"
    assert stage(found, "policy").flops > stage(every_kind, "policy").flops


def test_other_models_have_their_own_size_and_those_of_an_evaluation_are_held_in_turn(
    tmp_path: Path,
) -> None:
    """A Llama with tied embeddings has V·h weights there, 4h² + 3·h·i + 2h in each of 2 layers, and h in the norm."""
    llama = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
             "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    large = 1000 * 256 + 2 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256) + 256
    own = 669_312
    text = EVERY_KIND.replace("data:\n", f"models: {{large: {{source: {tmp_path}}}}}\ndata:\n", 1)
    overrides = [
        "stages.pairs.policy=large", "stages.evaluation.baseline=large", "stages.evaluation.judge={verifier: arithmetic}",
        "stages.evaluation.also={model: large}",
    ]  # fmt: skip
    found = estimate_recipe(parse_recipe(text, overrides=overrides), gpu="h100")
    assert weights(found, "pairs")["policy"] == (large, False)
    assert weights(found, "evaluation") == {
        "candidate": (own, False), "baseline": (large, False), "also": (large, False),
    }  # fmt: skip
    assert stage(found, "evaluation").memory.weights == 4 * large
    assert weights(found, "dpo") == {"policy": (own, True), "reference": (own, False)}
    same = estimate_recipe(parse_recipe(EVERY_KIND), gpu="h100")
    assert stage(same, "evaluation").memory.weights == 4 * (own + own + 128), "one of the two, and the reward"
    assert stage(found, "evaluation").flops > stage(same, "evaluation").flops


@pytest.mark.parametrize("name", ["critic_free", "raft"])
def test_a_model_that_judges_in_a_watch_is_held_and_asked(name: str) -> None:
    """The watch samples before the first iteration, where no pair differs, and 4 (2) times after it. Then it asks about
    10 pairs in both orders with both answers."""
    plain = stage(estimate_recipe(parse_recipe(EVERY_KIND), gpu="h100"), name)
    watch = "{judge: {model: sft}, every: 1, prompts: {data: prompts, split: train, samples: 10}}"
    found = stage(
        estimate_recipe(parse_recipe(EVERY_KIND, overrides=[f"stages.{name}.watch={watch}"]), gpu="h100"),
        name,
    )
    times = 4 if name == "critic_free" else 2
    more = [each for each in found.workload.networks if each not in plain.workload.networks]
    assert [(each.role, each.weights, each.is_trained) for each in more] == [("watch", 669_312, False)]
    [asked] = [each for each in found.workload.passes if each.role == "watch"]
    assert (asked.times, asked.sequences.count) == (times, 40)
    [sampling] = [each for each in found.workload.samplings if each.count == 10]
    assert sampling.times == 1 + times


def test_a_member_by_halves_trains_on_half_of_the_rows() -> None:
    overrides = ["stages.reward.members={count: 2, by: halves}", "rewards.main.ensemble={combine: mean}"]
    text = EVERY_KIND.replace("init: reward,", "init: reward_1,").replace(
        "reward_model: reward,", "reward_model: reward_2,"
    )
    found = estimate_recipe(parse_recipe(text, overrides=overrides), gpu="h100")
    counts = [stage(found, f"reward_{number}").workload.counts for number in (1, 2)]
    assert [each["train_rows"] for each in counts] == [450, 450], "of 900"
    assert [each["optimizer_steps"] for each in counts] == [29, 29]
    assert [role for role, (_, trained) in weights(found, "raft").items() if not trained] == [
        "reward_1",
        "reward_2",
    ]


@pytest.mark.parametrize("batch_size", [32, 64, 128])
def test_packing_is_counted_in_rows_of_a_pass(batch_size: int) -> None:
    """The estimate is close to batches drawn from the same lengths and packed by the code that packs them."""
    overrides = [f"stages.sft.batch_size={batch_size}", "stages.sft.group_by_length=false"]
    recipes = {
        packing: parse_recipe(EVERY_KIND, overrides=[*overrides, f"stages.sft.packing={packing}"])
        for packing in ("true", "false")
    }
    found = {
        packing: stage(estimate_recipe(recipe, gpu="h100"), "sft") for packing, recipe in recipes.items()
    }
    packed, padded = (found[each].workload.passes[0].sequences for each in ("true", "false"))
    assert padded.count == batch_size
    counter, counted_by = token_counter(None, is_character_model=True)
    lengths = count_data(recipes["true"], "demonstrations", counter, counted_by=counted_by).whole.tokens
    draw = random.Random(3)
    tokens = []
    for _ in range(200):
        batch = [draw.choice(lengths) for _ in range(batch_size)]
        tokens.append(len(first_fit_decreasing(batch, capacity=max(batch))) * max(batch))
    assert packed.count * packed.tokens == pytest.approx(sum(tokens) / len(tokens), rel=0.12)
    assert packed.count * packed.tokens < 0.9 * padded.count * padded.tokens
    assert packed.count * packed.logit_tokens == pytest.approx(padded.count * padded.logit_tokens)
    assert found["true"].flops < found["false"].flops
    assert found["true"].memory.activations < found["false"].memory.activations


def test_rows_of_like_length_leave_nothing_to_pack() -> None:
    both = [
        stage(estimate_recipe(parse_recipe(EVERY_KIND, overrides=[f"stages.sft.packing={each}"]), gpu="h100"), "sft")
        for each in ("true", "false")
    ]  # fmt: skip
    assert both[0].workload == both[1].workload


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["estimate", *arguments])


def test_the_command_prints_a_row_for_each_stage() -> None:
    done = run("quickstart", "--gpu", "h200", "--gpus", "8", "--nodes", "2", "--price", "3.5")
    assert done.exit_code == ExitCode.OK, done.output
    assert "472,704 parameters · H200 SXM (NVIDIA H200 data sheet)" in done.output
    for name in ("sft", "reward", "value", "policy", "evaluation"):
        assert f" {name} " in done.output
    assert "2 × 8 ddp" in done.output
    assert "demonstrations: 20,000 generated rows, tokens counted one per character" in done.output


def test_the_command_prints_json_and_measures_this_cpu() -> None:
    done = run("quickstart", "--json")
    told = json.loads(done.stdout)
    assert [each["stage"] for each in told["stages"]] == ["sft", "reward", "value", "policy", "evaluation"]
    assert told["device"]["is_cpu"] and told["device"]["float32"] > 1e9
    assert told["cost"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--gpu", "h300"], "--gpu=h300 is not known; use one of h100, h200, a100, l40s, 4090, cpu"),
        (["quickstart", "--set", f"model.source=hub:some/model@{'0' * 40}"], "not in the local cache"),
        (["quickstart", "--set", "data.preferences.source=no_such.jsonl", "--set", "data.preferences.rows=null"],
         "no_such.jsonl' is not a file here, so its rows cannot be counted"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_is_refused_with_the_remedy(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    done = run(*arguments)
    assert done.exit_code == ExitCode.BAD_INPUT, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_data_that_is_elsewhere_is_taken_to_be_as_long_as_the_limits() -> None:
    done = run("quickstart", "--set", "data.preferences.source=no_such.jsonl", "--gpu", "h100")
    assert done.exit_code == ExitCode.OK, done.output
    assert (
        "no_such.jsonl is not here: 12,000 rows as the recipe says, all as long as its limits" in done.output
    )


def test_a_dataset_of_the_hub_has_as_many_rows_as_are_loaded() -> None:
    source = f"hub:org/name@{'0' * 40}"
    base = ["quickstart", "--set", f"data.preferences.source={source}", "--gpu", "h100"]
    done = run(*base, "--set", "data.preferences.load={split: train, max_rows: 5000}")
    assert done.exit_code == ExitCode.OK, done.output
    assert f"{source} is not here: 5,000 rows as the recipe says, all as long as its limits" in done.output
    without = ["--set", "data.preferences.load={split: train}", "--set", "data.preferences.rows=null"]
    refused = run(*base, *without)
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "is not a file here, so its rows cannot be counted" in refused.stderr


def test_a_quickstart_for_seven_billion_weights_names_the_gpus_that_it_needs(tmp_path: Path) -> None:
    llama = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
             "num_hidden_layers": 32, "num_attention_heads": 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    recipe = load_recipe("quickstart", [f"model.source={tmp_path}"])
    found = estimate_recipe(recipe, gpu="h100", gpus=8)
    policy = stage(found, "policy")
    # policy and critic are trained (16 bytes), reference and reward model are held (4): 40 bytes · 6.7 billion
    held = policy.memory.weights + policy.memory.optimizer + policy.memory.gradients
    assert held == pytest.approx(40 * 6.7e9 / 8, rel=0.02)
    assert (policy.layout.strategy, policy.fits) == ("fsdp2", True)
    overrides = [f"model.source={tmp_path}", "stages.policy.algorithm.freeze_critic=all"]
    frozen = stage(estimate_recipe(load_recipe("quickstart", overrides), gpu="h100", gpus=8), "policy")
    # a frozen critic is held like the reference: 16 + 3 · 4 bytes
    assert frozen.layout.world == policy.layout.world
    with_frozen = frozen.memory.weights + frozen.memory.optimizer + frozen.memory.gradients
    assert with_frozen == pytest.approx(28 * 6.7e9 / 8, rel=0.02)
    assert policy.smallest is not None and policy.smallest[0].world in (4, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "gpu", "rows"),
    [
        (["microbatch_size=4"], "cpu", 4),
        (["microbatch_size=4"], "h100", None),
        (["microbatch_size=4", "rollout.max_rows=7"], "h100", 7),
        (["microbatch_size=4", "rollout.max_rows=7"], "cpu", 7),
    ],
)
def test_passes_that_train_do_not_bound_what_a_gpu_samples(
    settings: list[str], gpu: str, rows: int | None
) -> None:
    """All responses of a rollout are sampled side by side, since they fit."""
    overrides = [f"stages.policy.{each}" for each in settings]
    policy = stage(estimate_recipe(parse_recipe(EVERY_KIND, overrides=overrides), gpu=gpu), "policy")
    assert {each.sequences.at_once for each in policy.workload.passes if each.does == "train"} == {4}
    for each in policy.workload.samplings:
        assert each.at_once == (each.count if rows is None else min(rows, each.count))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluation", "collected", "pairs"])
@pytest.mark.parametrize(
    ("settings", "gpu", "rows"),
    [
        (["microbatch_size=4"], "cpu", 4),
        (["microbatch_size=4"], "h100", None),
        (["microbatch_size=4", "microbatch_tokens=1000"], "h100", 4),
        (["microbatch_size=4", "rollout.max_rows=7"], "h100", 7),
    ],
)
def test_passes_that_read_do_not_bound_what_a_gpu_samples_in_stages_that_do_not_train(
    name: str, settings: list[str], gpu: str, rows: int | None
) -> None:
    overrides = [f"stages.{name}.{each}" for each in settings]
    found = stage(estimate_recipe(parse_recipe(EVERY_KIND, overrides=overrides), gpu=gpu), name)
    assert {each.sequences.at_once for each in found.workload.passes} == {4}
    for each in found.workload.samplings:
        assert each.at_once == (each.count if rows is None else rows)


def test_a_policy_on_selected_prompts_is_counted_as_if_all_were_kept() -> None:
    recipe = EVERY_KIND.replace("data:\n", "data:\n  middling: {from: collected, pass_rate: [0.2, 0.8]}\n", 1)
    assert recipe != EVERY_KIND
    whole = estimate_recipe(parse_recipe(EVERY_KIND), gpu="h100")
    selected = estimate_recipe(
        parse_recipe(recipe, overrides=["stages.critic_free.prompts=middling"]), gpu="h100"
    )
    assert "middling" not in {each.name for each in selected.stages}
    expected = replace(stage(whole, "critic_free").workload, basis=())
    assert replace(stage(selected, "critic_free").workload, basis=()) == expected


def test_a_stage_that_vllm_samples_is_estimated_with_it_and_marked(tmp_path: Path) -> None:
    recipe, with_vllm = tmp_path / "plain.yaml", tmp_path / "vllm.yaml"
    recipe.write_text(EVERY_KIND)
    both = EVERY_KIND.replace("iterations: 2, minibatch", "iterations: 2, rollout: {engine: vllm}, minibatch")
    both = both.replace(
        "iterations: 4, batch_size: 64, minibatch_size: 32}\n  critic_free",
        "iterations: 4, batch_size: 64, minibatch_size: 32, rollout: {engine: vllm, servers: 2}, resources: {gpus: 8}}\n  critic_free",
    )
    with_vllm.write_text(both)
    before, after = (run(str(each), "--gpu", "h100") for each in (recipe, with_vllm))
    assert "*" not in before.stdout and "vllm" not in before.stdout
    [row] = [line for line in after.stdout.splitlines() if line.split()[:1] == ["raft"]]
    assert re.search(r"\d (s|min|h)\* ", row)
    [row] = [line for line in after.stdout.splitlines() if line.split()[:1] == ["policy"]]
    assert "6 ddp + 2 vllm" in row
    words = " ".join(after.stdout.split())
    assert "* the time of vLLM's sampling is from a roofline model that was compared with no GPU" in words
    assert re.search(r"raft: [\d,]+ tokens/s in the stage's process, \d+ rows at once", words)
    assert re.search(
        r"policy: [\d,]+ tokens/s on 2 servers, \d+ rows at once each, .* until new weights", words
    )
    found = json.loads(run(str(with_vllm), "--gpu", "h100", "--json").stdout)
    stages = {each["stage"]: each for each in found["stages"]}
    assert {name for name, each in stages.items() if each["vllm"] is not None} == {"policy", "raft"}
    policy = stages["policy"]
    assert (policy["layout"]["gpus"], policy["vllm"]["engines"]) == (6, 2)
    assert policy["gpu_hours"] == pytest.approx(8 * policy["seconds"] / 3600), "servers cost as much"
    assert policy["vllm"]["sampling"] + policy["vllm"]["sending"] < policy["seconds"]
    with_vllm.write_text(both.replace("servers: 2}", "servers: 2, tensor_parallel: 3}"))
    [in_parts] = [
        each
        for each in json.loads(run(str(with_vllm), "--gpu", "h100", "--json").stdout)["stages"]
        if each["stage"] == "policy"
    ]
    assert (in_parts["layout"]["gpus"], in_parts["vllm"]["engines"]) == (2, 2)
    assert in_parts["vllm"]["gpus_of_each"] == in_parts["vllm"]["tensor_parallel"] == 3
    assert in_parts["gpu_hours"] == pytest.approx(8 * in_parts["seconds"] / 3600)
