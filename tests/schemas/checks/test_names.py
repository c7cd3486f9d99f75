"""Names that mean nothing, or something of the wrong kind, are refused; so are stages that wait for one another."""

from typing import Any

from tests.support.every import every
from vantage.schemas.loading.validation import problems_of_names

STAGES = "stages"


def said(plain: Any) -> list[str]:
    return [str(problem) for problem in problems_of_names(plain)]


def put(plain: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    node: Any = plain
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[int(last) if isinstance(node, list) else last] = value
    return plain


def test_a_right_recipe_has_no_problems(plain: dict[str, Any]) -> None:
    assert said(plain) == []


POLICIES = (
    "sft or dpo or kto or policy_optimization or best_of_n or distillation stage, or the recipe's model"
)


@every(
    ("path", "value", "message"),
    [
        # -- stages
        ("stages.policy.critic", "sft", "'sft' is an sft stage; a critic is a value_pretraining or reward_model "
         "stage; use one of: reward, value"),
        ("stages.policy.critic", "model", "'model' is the recipe's model; a critic is a value_pretraining or "
         "reward_model stage; use one of: reward, value"),
        ("stages.policy.critic", "policy", "'policy' is this stage itself; use one of: reward, value"),
        ("stages.policy.critic", "valeu", "no stage is called 'valeu'; did you mean 'value'?"),
        ("stages.policy.critic", "zzz", "no stage is called 'zzz'; use one of: reward, value"),
        ("stages.policy.fresh_critic", "value", f"'value' is a value_pretraining stage; a fresh_critic is a {POLICIES}; "
         "use one of: sft, model"),
        ("stages.policy.fresh_critic", "policy", "'policy' is this stage itself; use one of: sft, model"),
        ("stages.policy.init", "reward", f"'reward' is a reward_model stage; an init is a {POLICIES}; "
         "use one of: sft, model"),
        ("stages.policy.reference", "value", f"'value' is a value_pretraining stage; a reference is a {POLICIES}; "
         "use one of: sft, model"),
        ("stages.value.init", "evaluation", "'evaluation' is an evaluation stage; an init is a reward_model or "
         f"{POLICIES}; use one of: sft, reward, policy, model"),
        ("stages.value.policy", "reward", f"'reward' is a reward_model stage; a policy is a {POLICIES}; "
         "use one of: sft, policy, model"),
        ("stages.reward.init", "value", f"'value' is a value_pretraining stage; an init is a {POLICIES}; "
         "use one of: sft, policy, model"),
        ("stages.evaluation.candidate", "reward", f"'reward' is a reward_model stage; a candidate is a {POLICIES}; "
         "use one of: sft, policy, model"),
        ("stages.evaluation.critic", "policy", "'policy' is a policy_optimization stage; a critic is a value_pretraining stage; "
         "use one of: value"),
        ("stages.evaluation.critic", "reward", "'reward' is a reward_model stage; a critic is a value_pretraining stage; "
         "use one of: value"),
        ("stages.evaluation.critic", "model", "'model' is the recipe's model; a critic is a value_pretraining stage; "
         "use one of: value"),
        ("stages.evaluation.critic", "valeu", "no stage is called 'valeu'; did you mean 'value'?"),
        ("rewards.main.terms.0.model", "sft", "'sft' is an sft stage; a model is a reward_model stage; "
         "use one of: reward"),
        # -- data
        ("stages.sft.data", "demo", "no dataset is called 'demo'; did you mean 'demos'?"),
        ("stages.sft.data", "pairs", "stages.sft.data: reads as demonstrations what stages.reward.data reads as preferences"),
        ("stages.reward.data", "demos", "stages.reward.data: reads as preferences what stages.sft.data reads as "
         "demonstrations; name the source a second time, as another dataset"),
        ("stages.value.prompts", "pairs", "reads as prompts what stages.reward.data reads as preferences"),
        ("data.demos.source", "builtin:arithmetic/prompts", "reads demonstrations, but builtin:arithmetic/prompts "
         "holds prompts; name another dataset here"),
        ("data.pairs.source", "builtin:arithmetic/demonstrations", "reads preferences, but "
         "builtin:arithmetic/demonstrations holds demonstrations; name another dataset here"),
        ("data.demos.columns", {"prompt": "x", "response": "y"}, "builtin:arithmetic/demonstrations has our columns "
         "already; remove columns"),
        ("data.pairs", {"source": "x.json", "columns": {"prompt": "a", "chosen": "b"}},
         "has no rejected, which stages.reward.data reads; add `rejected: COLUMN`"),
        # -- rewards, verifiers
        ("stages.policy.reward", "mian", "no reward is called 'mian'; did you mean 'main'?"),
        ("stages.evaluation.judge", {"reward": "other"}, "no reward is called 'other'; use one of: main"),
        ("stages.evaluation.judge", {"verifier": "arithmetics"}, "no verifier is called 'arithmetics'; "
         "did you mean 'arithmetic'?"),
        ("rewards.main.terms.0", {"verifier": "gsm8k"}, "no verifier is called 'gsm8k'; use one of: arithmetic, arithmetic_long"),
        ("stages.policy.algorithm", {"preset": "vapo", "positive_verifier": "x"},
         "no verifier is called 'x'; use one of: arithmetic, arithmetic_long"),
        # -- gates
        ("stages.value.gate.metric", "explained_varience", "a value_pretraining stage does not measure "
         "'explained_varience'; did you mean 'explained_variance'?"),
        ("stages.reward.gate", [{"metric": "pair_accuracy"}, {"metric": "win_rate"}],
         "a reward_model stage does not measure 'win_rate'; use one of: pair_accuracy, preference_loss, "),
        ("stages.evaluation.gate.metric", "score", "an evaluation stage with a verifier as judge does not measure "
         "'score'; name a reward as judge or also, or use one of: accuracy, "),
        ("stages.evaluation.gate.metric", "pass_at_16", "an evaluation stage with a verifier as judge does not measure "
         "'pass_at_16'; set samples_per_prompt: 16 or more, or "),
        ("stages.evaluation.also", {"reward": "other"}, "no reward is called 'other'; use one of: main"),
        ("stages.evaluation.demonstrations", "demoes", "no dataset is called 'demoes'; did you mean 'demos'?"),
        ("stages.evaluation.judge", {"reward": "main"}, "an evaluation stage with a reward as judge does not measure "
         "'accuracy_gain'; "),
        ("stages.sft.gate", {"metric": "prompts_too_long", "at_most": 5, "confidence": 0.95},
         "'prompts_too_long' comes without a standard error, so no confidence can be asked of it; remove confidence, or "
         "gate on test_nll"),
        ("stages.evaluation.gate", {"metric": "accuracy_gain_standard_error", "at_most": 1, "confidence": 0.9},
         "'accuracy_gain_standard_error' comes without a standard error, so no confidence can be asked of it; "
         "remove confidence, or gate on one of: accuracy, "),
        # -- publication
        ("publish.0.stage", "value", "'value' is a value_pretraining stage; a stage is a sft or dpo or kto "
         "or policy_optimization or best_of_n or distillation or reward_model stage; use one of: sft, reward, policy"),
        ("publish.0.stage", "model", "'model' is the recipe's model; a stage is a sft or dpo"),
        ("publish.0.after", "sft", "'sft' has no gate that could pass; use one of: reward, value, evaluation"),
        ("publish.0.alias", "latest", "'latest' is reserved by MLflow, which would not register the model under it; name another"),
        ("publish.0.alias", "v12", "'v12' is reserved by MLflow"),
        ("publish.0.after", "evaluate", "no stage is called 'evaluate'; did you mean 'evaluation'?"),
    ],
)  # fmt: skip
def test_wrong_names(plain: dict[str, Any], path: str, value: Any, message: str) -> None:
    """A name that does not exist, or is of another kind, is refused with its remedy."""
    problems = said(put(plain, path, value))
    assert any(message in problem for problem in problems), problems


def test_a_second_judge_is_no_judge_that_a_gate_could_name(plain: dict[str, Any]) -> None:
    put(plain, "stages.evaluation.also", {"reward": "main"})
    put(plain, "stages.evaluation.gate.metric", "preference_win_rate")
    [problem] = [each for each in said(plain) if "preference_win_rate" in each]
    assert "an evaluation stage with a verifier as judge does not measure 'preference_win_rate'" in problem


def test_a_problem_stands_at_its_field(plain: dict[str, Any]) -> None:
    put(plain, "stages.policy.critic", "sft")
    put(plain, "stages.reward.gate", [{"metric": "pair_accuracy"}, {"metric": "win_rate"}])
    put(plain, "rewards.main.terms.0.model", "sft")
    assert [problem.path for problem in problems_of_names(plain)] == [
        ("stages", "policy", "critic"),
        ("rewards", "main", "terms", 0, "model"),
        ("stages", "reward", "gate", 1, "metric"),
    ]


def test_a_kind_that_no_stage_has_is_asked_for(plain: dict[str, Any]) -> None:
    del plain["stages"]["reward"], plain["stages"]["value"]
    problems = said(plain)
    assert (
        "stages.policy.critic: no stage is called 'value'; add a value_pretraining or reward_model stage"
        in problems
    )
    assert "rewards.main.terms.0.model: no stage is called 'reward'; add a reward_model stage" in problems


def test_a_stage_cannot_be_called_model(plain: dict[str, Any]) -> None:
    plain["stages"]["model"] = {"kind": "sft", "data": "demos"}
    assert said(plain) == [
        "stages.model: 'model' always means the recipe's model; give the stage another name"
    ]


def test_demonstrations_may_be_read_for_their_prompts(plain: dict[str, Any]) -> None:
    for stage in ("value", "policy", "evaluation"):
        plain["stages"][stage]["prompts"] = "demos"
    assert said(plain) == []


def test_two_publications_cannot_share_an_alias(plain: dict[str, Any]) -> None:
    plain["publish"].append({**plain["publish"][0], "stage": "sft"})
    assert said(plain) == [
        "publish.1.alias: publish.0 moves the alias 'champion' of 'small' too; "
        "an alias points at one model; name another"
    ]
    plain["publish"][1]["alias"] = "challenger"
    assert said(plain) == []


# -- cycles


def test_a_ring_is_named_in_full(plain: dict[str, Any]) -> None:
    put(plain, "stages.sft.init", "policy")
    del plain["stages"]["policy"]["critic"], plain["stages"]["policy"]["reward"]
    assert said(plain) == [
        "stages.sft.init: stages wait for one another: sft reads policy (stages.sft.init), "
        "policy reads sft (stages.policy.init); name a stage before them in one of these fields"
    ]


def test_a_ring_through_a_reward_is_found(plain: dict[str, Any]) -> None:
    put(plain, "stages.reward.init", "policy")
    del plain["stages"]["policy"]["critic"]
    assert said(plain) == [
        "stages.reward.init: stages wait for one another: reward reads policy (stages.reward.init), "
        "policy reads reward (rewards.main.terms.0.model); name a stage before them in one of these fields"
    ]


def test_every_separate_ring_is_found(plain: dict[str, Any]) -> None:
    for one, other in (("a", "b"), ("c", "d")):
        plain["stages"][one] = {"kind": "sft", "data": "demos", "init": other}
        plain["stages"][other] = {"kind": "sft", "data": "demos", "init": one}
    plain["stages"]["sft"]["init"] = "a"
    problems = said(plain)
    assert len(problems) == 2
    assert "a reads b (stages.a.init), b reads a (stages.b.init)" in problems[0]
    assert "c reads d (stages.c.init), d reads c (stages.d.init)" in problems[1]


def test_a_long_chain_is_no_ring_and_a_long_ring_is_one(plain: dict[str, Any]) -> None:
    chain = {f"s{i}": {"kind": "sft", "data": "demos", "init": f"s{i + 1}"} for i in range(150)}
    plain["stages"] = {**chain, "s150": {"kind": "sft", "data": "demos"}}
    plain |= {"rewards": {}, "publish": []}
    assert said(plain) == []
    plain["stages"]["s150"]["init"] = "s0"
    assert len(said(plain)) == 1


@every(
    "plain",
    [
        {},
        {"stages": None},
        {"stages": []},
        {"stages": {"a": None, "b": 3, "c": {"kind": ["sft"]}, "d": {"kind": "rlhf", "init": "a"}}},
        {"stages": {"a": {"kind": "sft", "init": 3, "data": ["x"], "gate": "x"}}, "data": 3, "rewards": [1]},
        {
            "stages": {
                "a": {"kind": "reward_model", "data": ["x"]},
                "b": {"kind": "dpo", "data": {}, "init": 3},
            }
        },
        {"stages": {"a": {"kind": "preference_collection", "judge": ["x"], "prompts": [3]}}, "data": [3]},
        {"stages": {"a": {"kind": "sft", "reward": "none", "judge": {"reward": "none"}}}},
        {"stages": {"a": {"kind": "evaluation", "judge": "x", "gate": [3, None, {"metric": {}}]}}},
        {"stages": {}, "publish": [3, None, {"stage": {}, "alias": [], "registered_model": {}}]},
        {
            "stages": {},
            "publish": {"stage": 3},
            "rewards": {"main": {"terms": [3, {"model": {}}]}, "b": None},
        },
    ],
)
def test_other_shapes_are_left_to_pydantic(plain: Any) -> None:
    assert said(plain) == []


def test_a_verifier_of_another_builtin_task_is_refused(plain: dict[str, Any]) -> None:
    """Without this check the verifier would raise at the first response, hours after the recipe was loaded."""
    plain["data"]["tasks"] = {"source": "builtin:arithmetic_long/prompts"}
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "positive_verifier": "arithmetic"}
    found = [str(problem) for problem in problems_of_names(plain)]
    told = "'arithmetic' does not understand the prompts that policy reads (data.tasks: builtin:arithmetic_long/prompts)"
    assert [line for line in found if "policy.algorithm" in line] == [
        f"stages.policy.algorithm.positive_verifier: {told}; use arithmetic_long"
    ]
    plain["stages"]["policy"]["algorithm"]["positive_verifier"] = "arithmetic_long"
    assert not [line for line in map(str, problems_of_names(plain)) if "policy.algorithm" in line]


def test_rankings_do_not_come_in_a_csv(plain: dict[str, Any]) -> None:
    plain["data"]["pairs"] = {"source": "ranked.csv"}
    plain["stages"]["reward"].pop("data")
    plain["stages"]["reward"]["rankings"] = "pairs"
    assert (
        "data.pairs.source: rankings are lists of responses and ranks, and a .csv file has no lists; use .json, "
        ".jsonl or .parquet" in said(plain)
    )
    plain["data"]["pairs"] = {"source": "ranked.jsonl"}
    assert not [line for line in said(plain) if ".csv" in line]


def test_a_licence_is_of_a_step_of_the_recipe(plain: dict[str, Any]) -> None:
    plain["licenses"] = {"model": "MIT", "sft": "MIT", f"data.{next(iter(plain['data']))}": "MIT"}
    assert said(plain) == []
    plain["licenses"] = {"sfd": "MIT"}
    assert said(plain) == ["licenses.sfd: nothing here is called 'sfd'; did you mean 'sft'?"]
