"""A critic learns the return that the policy will see, or the recipe is refused."""

from typing import Any

import pytest

from tests.support.every import every
from vantage.schemas.checks.agreement import resolve
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.steps import dependencies, ordered_steps


def resolved(plain: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    recipe, problems = resolve(Recipe.model_validate(plain))
    return recipe.stages, [str(problem) for problem in problems]


def test_what_is_inherited_is_written_out(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["algorithm"] = {"preset": "ppo", "gamma": 0.99}
    stages, problems = resolved(plain)
    value, policy = stages["value"], stages["policy"]
    assert isinstance(value, ValuePretraining)
    assert isinstance(policy, PolicyOptimization)
    assert problems == []
    assert value.returns is not None
    assert (value.returns.kl_coef, value.returns.gamma) == (0.05, 0.99)
    assert (value.reference, policy.reference) == ("sft", "sft")


DIFFERING: dict[str, tuple[Any, str]] = {
    "gamma": (0.9, "0.9"),
    "kl_coef": (0.1, "0.1"),
    "kl_kind": ("k3", "k3"),
    "reward_scaling": ("normalise", "normalise"),
    "reward_clip": (0.3, "0.3"),
    "overlong_buffer": (0.2, "0.2"),
}
"""Switch of the returns → a value that is not the one of VAPO, and how it is said."""
OF_VAPO = {
    "gamma": "1", "kl_coef": "0", "kl_kind": "k1", "reward_scaling": "none", "reward_clip": "none",
    "overlong_buffer": "none",
}  # fmt: skip


def test_every_switch_of_the_returns_is_tested() -> None:
    assert set(DIFFERING) == set(OF_VAPO) == set(Returns.model_fields)


def test_returns_are_inherited_whole(plain: dict[str, Any]) -> None:
    switches = {switch: value for switch, (value, _) in DIFFERING.items()}
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", **switches}
    stages, problems = resolved(plain)
    assert problems == []
    assert stages["value"].returns.model_dump() == switches


@every("switch", list(DIFFERING))
def test_returns_that_are_given_must_be_the_policys(plain: dict[str, Any], switch: str) -> None:
    value, said = DIFFERING[switch]
    plain["stages"]["value"]["returns"] = {switch: value}
    assert resolved(plain)[1] == [
        f"stages.value.returns.{switch}: {said} is not the {switch} of 'policy' ({OF_VAPO[switch]}), "
        "which starts from this critic; leave returns out here, to inherit them"
    ]
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", switch: value}
    assert resolved(plain)[1] == []


@every("switch", list(DIFFERING))
def test_heirs_must_agree_on_every_switch_of_their_returns(plain: dict[str, Any], switch: str) -> None:
    value, said = DIFFERING[switch]
    plain["stages"]["other"] = {**plain["stages"]["policy"], "algorithm": {"preset": "vapo", switch: value}}
    assert resolved(plain)[1] == [
        "stages.value.returns: are to be those of the policy stages that start from this critic, "
        f"but {switch} differs: policy has {OF_VAPO[switch]}, other has {said}; "
        f"use one {switch} in all, or pretrain a critic for each"
    ]


def test_what_is_not_of_the_returns_may_differ_between_heirs(plain: dict[str, Any]) -> None:
    plain["stages"]["other"] = {
        **plain["stages"]["policy"],
        "algorithm": {"preset": "vapo", "lambda_policy": 0.9, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    }
    assert resolved(plain)[1] == []


def test_a_resolved_recipe_resolves_to_itself(plain: dict[str, Any]) -> None:
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert resolve(recipe) == (recipe, [])


def test_stages_other_than_critics_and_policies_stay(plain: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(plain)
    after, _ = resolve(recipe)
    assert {n: s for n, s in after.stages.items() if n not in ("value", "policy")} == {
        n: s for n, s in recipe.stages.items() if n not in ("value", "policy")
    }


@every(
    ("stage", "fields", "said"),
    [
        ("value", {"reward": "other"},
         "stages.value.reward: 'other' is not the reward of 'policy' ('main'), which starts from it; "
         "use one reward in both"),
        ("value", {"returns": {"kl_coef": 0.1}},
         "stages.value.returns.kl_coef: 0.1 is not the kl_coef of 'policy' (0.05), which starts from this critic; "
         "leave returns out here, to inherit them"),
        ("value", {"returns": {"kl_coef": 0.05, "gamma": 0.9}},
         "stages.value.returns.gamma: 0.9 is not the gamma of 'policy' (1), which starts from this critic; "
         "leave returns out here, to inherit them"),
        ("value", {"reference": "model"},
         "stages.value.reference: 'model' is not the reference of 'policy' ('sft'), whose reward counts KL; "
         "set reference: sft"),
        ("policy", {"reference": "model"},
         "stages.value.reference: 'sft' is not the reference of 'policy' ('model'), whose reward counts KL; "
         "set reference: model"),
    ],
)  # fmt: skip
def test_disagreements(plain: dict[str, Any], stage: str, fields: dict[str, Any], said: str) -> None:
    """A critic stage and a policy stage that disagree are refused with the field and both values."""
    plain["rewards"]["other"] = {"terms": [{"model": "reward", "weight": 2.0}]}
    plain["stages"]["policy"]["algorithm"] = "ppo"
    plain["stages"][stage] |= fields
    assert resolved(plain)[1] == [said]


def test_rewards_of_two_names_may_be_the_same(plain: dict[str, Any]) -> None:
    plain["rewards"]["other"] = plain["rewards"]["main"]
    plain["stages"]["value"]["reward"] = "other"
    assert resolved(plain)[1] == []


@pytest.mark.parametrize(
    "change", [{"missing_eos": {"subtract": 1.0}}, {"terms": [{"model": "reward", "weight": 2}]}]
)
def test_every_part_of_a_reward_counts(plain: dict[str, Any], change: dict[str, Any]) -> None:
    plain["rewards"]["other"] = {**plain["rewards"]["main"], **change}
    plain["stages"]["value"]["reward"] = "other"
    assert len(resolved(plain)[1]) == 1


def test_without_a_kl_part_references_may_differ(plain: dict[str, Any]) -> None:
    plain["stages"]["value"]["reference"] = "model"
    assert resolved(plain)[1] == []


def test_a_disagreement_of_heirs_is_said_once(plain: dict[str, Any]) -> None:
    plain["stages"]["gentle"] = {**plain["stages"]["policy"], "algorithm": "ppo"}
    assert resolved(plain)[1] == [
        "stages.value.returns: are to be those of the policy stages that start from this critic, but kl_coef differs: "
        "policy has 0, gentle has 0.05; use one kl_coef in all, or pretrain a critic for each"
    ]


# -- critics that nobody reads

NO_CRITIC = [
    "policy_gradient", "reinforce_pp", "reinforce_pp_baseline", "rloo", "remax", "grpo", "dr_grpo", "dapo",
    {"preset": "ppo", "shared_trunk": True},
]  # fmt: skip
NO_HEIR = "stages.value: no policy_optimization stage starts from this critic"


@every("algorithm", NO_CRITIC)
def test_a_critic_that_an_algorithm_does_not_read_is_left_out(plain: dict[str, Any], algorithm: Any) -> None:
    plain["stages"]["policy"] |= {"algorithm": algorithm, "minibatch_size": 256}
    recipe, problems = resolve(Recipe.model_validate(plain))
    policy, value = recipe.stages["policy"], recipe.stages["value"]
    assert problems == []
    assert isinstance(policy, PolicyOptimization)
    assert isinstance(value, ValuePretraining)
    assert policy.critic is None
    assert "critic" not in dependencies(recipe)["policy"]
    assert value.returns == Returns(), "not those of a policy that does not read it"
    assert NO_HEIR in warnings(recipe, dependencies(recipe))


def test_a_fresh_critic_that_is_not_read_is_left_out_too(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"algorithm": "dr_grpo", "critic": None, "fresh_critic": "model"}
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert "fresh_critic" not in dependencies(recipe)["policy"]


def test_a_critic_that_is_read_stays(plain: dict[str, Any]) -> None:
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert dependencies(recipe)["policy"]["critic"] == "value"
    assert NO_HEIR not in warnings(recipe, dependencies(recipe))
    plain["stages"]["policy"] |= {"critic": None, "fresh_critic": "sft"}
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert dependencies(recipe)["policy"]["fresh_critic"] == "sft"
    assert "value" in ordered_steps(recipe)
    assert NO_HEIR in warnings(recipe, dependencies(recipe))


def test_a_stage_that_does_not_read_the_critic_has_no_say_in_its_returns(plain: dict[str, Any]) -> None:
    plain["stages"]["other"] = {**plain["stages"]["policy"], "algorithm": {"preset": "dr_grpo", "gamma": 0.5}}
    stages, problems = resolved(plain)
    assert problems == []
    assert stages["value"].returns == Returns()


def test_a_critic_without_heirs_learns_plain_returns_or_those_it_is_given(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["critic"] = "reward"
    assert resolved(plain)[0]["value"].returns == Returns()
    plain["stages"]["value"]["returns"] = {"kl_coef": 0.1}
    stages, problems = resolved(plain)
    assert problems == []
    assert stages["value"].returns == Returns(kl_coef=0.1)


def test_dpo_is_held_to_what_it_starts_from(plain: dict[str, Any]) -> None:
    plain["stages"]["direct"] = {"kind": "dpo", "init": "sft", "data": "pairs"}
    assert resolved(plain)[0]["direct"].reference == "sft"
    plain["stages"]["direct"]["reference"] = "model"
    assert resolved(plain)[0]["direct"].reference == "model"


def test_what_a_policy_stage_does_not_read_is_no_dependency(plain: dict[str, Any]) -> None:
    """Demonstrations for a ptx term of weight 0 would be in the stage's key, and waited for, for nothing."""
    plain["stages"]["policy"]["ptx"] = "demos"
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert recipe.stages["policy"].ptx is None
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "ptx_coef": 0.5}
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert recipe.stages["policy"].ptx == "demos"


def test_how_many_responses_are_collected_is_written_out(plain: dict[str, Any]) -> None:
    pairs = {"kind": "preference_collection", "policy": "sft"}
    plain["stages"]["judged"] = {**pairs, "prompts": "tasks", "judge": {"verifier": "arithmetic"}}
    plain["stages"]["demonstrated"] = {**pairs, "demonstrations": "demos"}
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert recipe.stages["judged"].samples_per_prompt == 2
    assert recipe.stages["demonstrated"].samples_per_prompt == 1


# -- the optimiser of the critic


def test_an_optimiser_that_is_carried_on_is_kept(plain: dict[str, Any]) -> None:
    assert not resolved(plain)[0]["value"].keep_optimizer
    plain["stages"]["policy"]["critic_optimizer"] = "carry"
    stages, problems = resolved(plain)
    assert problems == []
    assert stages["value"].keep_optimizer


def test_a_reward_model_has_no_optimiser_to_carry_on(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"critic_optimizer": "carry", "critic": "reward"}
    assert resolved(plain)[1] == [
        "stages.policy.critic_optimizer: carry goes on with the optimiser of the critic's pretraining, and 'reward' had "
        "none; put a value_pretraining stage between them, or set critic_optimizer: fresh"
    ]


BY_SAMPLER = {"preset": "ppo", "old_logprobs": "sampler"}
UNRATED = {**BY_SAMPLER, "importance_ratio": False}
SHARDED = {"gpus": 2, "distributed": {"strategy": "fsdp2"}}


def test_an_optimiser_that_is_cut_is_not_carried_on(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["critic_optimizer"] = "carry"
    plain["stages"]["value"]["resources"] = SHARDED
    assert resolved(plain)[1] == [
        "stages.value.resources.distributed.strategy: the optimiser's state is carried on from here, and fsdp2 cuts it; "
        "use strategy: ddp here, or critic_optimizer: fresh in the policy stage"
    ]


def test_an_optimiser_in_8_bits_is_not_carried_on(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["critic_optimizer"] = "carry"
    plain["stages"]["value"]["optimizer_states"] = "8bit"
    assert resolved(plain)[1] == [
        "stages.value.optimizer_states: the optimiser's state is carried on from here in float32, not in 8bit; leave "
        "optimizer_states out here, or set critic_optimizer: fresh in the policy stage"
    ]


def test_an_exact_kl_that_a_critic_inherits_reads_no_cut_weights(plain: dict[str, Any]) -> None:
    """The policy's stage may be whole; without KL in the reward nothing is read."""
    plain["stages"]["policy"]["algorithm"] = {"preset": "ppo", "kl_coef": 0.1, "kl_kind": "full"}
    plain["stages"]["value"]["resources"] = SHARDED
    assert resolved(plain)[1] == [
        "stages.value.resources.distributed.strategy: the policy stage's kl_kind=full reads all weights of the reference at "
        "once, and fsdp2 cuts them; use strategy: ddp here, or another kl_kind in the policy stage"
    ]
    plain["stages"]["policy"]["algorithm"]["kl_coef"] = 0.0
    assert resolved(plain)[1] == []


# -- frozen networks in host memory


def test_what_a_stage_does_not_read_is_not_offloaded(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["resources"] = {"offload": ["reference", "reward", "optimizer"]}
    assert resolved(plain)[1] == []
    plain["stages"]["sft"]["resources"] = {"offload": ["reference", "optimizer", "reward"]}
    assert resolved(plain)[1] == [
        "stages.sft.resources.offload: this stage reads no reference; leave reference out",
        "stages.sft.resources.offload: this stage has no reward that is a model; leave reward out",
    ]


def test_networks_that_share_the_policys_base_are_not_offloaded(plain: dict[str, Any]) -> None:
    plain["model"]["lora"] = {"rank": 2}
    plain["stages"]["policy"]["resources"] = {"offload": ["reference"]}
    assert resolved(plain)[1] == [
        "stages.policy.resources.offload: with adapters (lora), the frozen networks share the policy's base and take no memory of "
        "their own; leave them out, or set lora: false"
    ]


FULL_KL = {"preset": "ppo", "kl_coef": 0.1, "kl_kind": "full"}


@pytest.mark.parametrize(
    ("stage", "changes", "said"),
    [
        ("policy", {"critic_optimizer": "carry", "critic": None, "fresh_critic": "sft"}, "this stage starts from none"),
        ("policy", {"critic_optimizer": "carry", "algorithm": "grpo", "critic": None}, "this stage starts from none"),
        ("policy", {"critic_optimizer": "carry", "resources": SHARDED}, "fsdp2 cuts it"),
        ("value", {"keep_optimizer": True, "resources": SHARDED}, "fsdp2 cuts it"),
        ("policy", {"critic_optimizer": "carry", "optimizer_states": "8bit"}, "carry goes on with moments in float32"),
        ("value", {"keep_optimizer": True, "optimizer_states": "8bit"}, "keep_optimizer writes the optimiser's state in float32"),
        ("sft", {"optimizer_states": "8bit", "resources": SHARDED}, "optimizer_states=8bit holds moments in blocks, .*strategy: ddp"),
        ("policy", {"resources": SHARDED | {"offload": ["reference"]}}, "offload=reference moves whole weights, .*use strategy: ddp"),
        ("policy", {"compile": True, "resources": {"offload": ["reference"]}}, "has not been tried with a reference that visits the GPU"),
        ("sft", {"optimizer_states": "8bit", "resources": {"offload": ["optimizer"]}}, "are computed on the GPU, .* leave one of them out"),
        ("policy", {"algorithm": FULL_KL, "resources": {"offload": ["reference"]}}, "kl_kind=full reads the reference in each pass of the policy"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_is_refused(
    plain: dict[str, Any], stage: str, changes: dict[str, Any], said: str
) -> None:
    plain["stages"][stage] |= changes
    with pytest.raises(ValueError, match=said):
        Recipe.model_validate(plain)


@every(
    ("stage", "changes", "said"),
    [
        ("policy", {"rollout": {"ahead": 1}, "resources": SHARDED}, r"rollout.ahead=1 samples from a whole copy .*fsdp2 cuts it; use servers"),
        ("policy", {"rollout": {"ahead": 1, "importance_cap": 3.0}, "algorithm": "sao"}, "importance_cap=3.0 bounds π_old/π_sampler, which is 1 with .*leave it out"),
        ("policy", {"rollout": {"ahead": 1}, "algorithm": BY_SAMPLER | {"trust_region_kl": 0.1}}, "trust_region_kl=0.1 is about the last update"),
        ("policy", {"rollout": {"ahead": 1}, "algorithm": BY_SAMPLER | {"kl_penalty_coef": 0.2}}, "kl_penalty_coef=0.2 is about the last update"),
        ("policy", {"rollout": {"ahead": 1}, "algorithm": {"preset": "spo", "old_logprobs": "sampler"}}, "advantage=tracked_mean is about the last update"),
        ("policy", {"rollout": {"ahead": 1}, "algorithm": UNRATED}, "needs a ratio to the policy that sampled, .* set old_logprobs: policy, or ahead: 0"),
        ("policy", {"rollout": {"importance_cap": 3.0}}, "importance_cap=3.0 is read only where responses are sampled ahead; set rollout.ahead: 1"),
        ("policy", {"algorithm": BY_SAMPLER | {"rollout_correction": "tis"}}, "rollout_correction bounds π_old/π_sampler, which is 1 with old_logprobs=sampler"),
        ("policy", {"algorithm": {"preset": "sao", "rollout_correction": "icepop"}}, "which is 1 with old_logprobs=sampler; leave it out"),
        ("policy", {"rollout": {"ahead": 1, "importance_cap": 3.0}, "algorithm": {"preset": "ppo", "rollout_correction": "tis"}}, "importance_cap=3.0 and algorithm.rollout_correction both bound .*; leave one of them out"),
        ("policy", {"algorithm": {"preset": "ppo", "rollout_correction": "vtrace"}}, "'vtrace' is not one of tis, icepop; use one of them"),
        ("policy", {"algorithm": {"preset": "ppo", "rollout_correction": {"action": "mask"}}}, "neither low nor high is set"),
        ("policy", {"algorithm": {"preset": "ppo", "rollout_correction": {"action": "mask", "low": 1.5}}}, "less than or equal to 1"),
        ("policy", {"algorithm": {"preset": "ppo", "rollout_correction": {"action": "mask", "high": 0.5}}}, "greater than or equal to 1"),
        ("policy", {"algorithm": {"preset": "ppo", "rollout_correction": {"action": "clip", "high": 2}}}, "Input should be 'truncate' or 'mask'"),
        ("policy", {"rollout": {"ahead": 2}}, "Input should be 0 or 1"),
        ("policy", {"rollout": {"ahead": 1, "importance_cap": 0}}, "greater than 0"),
        ("value", {"rollout": {"ahead": 1}, "resources": SHARDED}, r"rollout.ahead=1 samples from a whole copy .*fsdp2 cuts it; use servers"),
        ("value", {"rollout": {"ahead": 1}, "rollouts": "collected"}, "reads all responses from rollouts=collected; set a larger fresh_share, or leave rollout out"),
        ("value", {"rollout": {"ahead": 1}, "rollouts": "collected", "fresh_share": 0.001}, "fresh_share=0.001 reads all responses from"),
        ("value", {"rollout": {"ahead": 1, "importance_cap": 3.0}}, "Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_ahead_is_refused(
    plain: dict[str, Any], stage: str, changes: dict[str, Any], said: str
) -> None:
    plain["stages"][stage] |= changes
    with pytest.raises(ValueError, match=said):
        Recipe.model_validate(plain)
    fitting = {"rollout": {"ahead": 1}, "resources": {}}
    plain["stages"]["policy"] |= {**fitting, "algorithm": "sao"}
    plain["stages"]["value"] |= {**fitting, "rollouts": None, "fresh_share": 0.0}
    stages = Recipe.model_validate(plain).stages
    assert [stages[name].rollout.ahead for name in ("value", "policy")] == [1, 1]
