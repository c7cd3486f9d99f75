"""The form of a critic in a whole recipe is inherited, compared, and refused where nothing reads it."""

from tests.support.every import every
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.critic_head import CriticHead
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining

GATE = "gate: {metric: explained_variance, at_least: 0.3}"


def problems(text: str) -> list[str]:
    try:
        parse_recipe(text)
    except RecipeError as error:
        return str(error).splitlines()
    return []


def with_algorithm(text: str, algorithm: str, more: str = "") -> str:
    return text.replace("    algorithm: vapo\n", f"    algorithm: {algorithm}\n{more}")


def value_of(text: str) -> ValuePretraining:
    stage = parse_recipe(text).stages["value"]
    assert isinstance(stage, ValuePretraining)
    return stage


def test_the_value_stage_takes_the_head_of_the_policy(text: str) -> None:
    assert "    algorithm: vapo\n" in text
    assert value_of(text).head is None
    found = value_of(with_algorithm(text, "{preset: vapo, critic_head: {quantiles: 16, huber: 0.5}}"))
    assert found.head == CriticHead(quantiles=16, huber=0.5)


def test_a_head_of_its_own_has_to_be_that_of_the_policy(text: str) -> None:
    own = text.replace(GATE, f"head: {{quantiles: 16}}, {GATE}") if "{kind: value" in text else text.replace(
        f"    {GATE}", f"    head: {{quantiles: 16}}\n    {GATE}"
    )  # fmt: skip
    [problem] = problems(own)
    assert (
        "stages.value.head: {quantiles: 16} is not critic_head of 'policy' ({}), which starts from this critic; use one head "
        "in all, or pretrain a critic for each" in problem
    )
    assert problems(with_algorithm(own, "{preset: vapo, critic_head: {quantiles: 16}}")) == []


@every(
    ("metric", "head", "needed"),
    [
        ("quantile_calibration_error", "{}", "quantiles: 32"),
        ("quantile_calibration_error", "{ensemble: 2}", "quantiles: 32"),
        ("critic_disagreement", "{quantiles: 4}", "ensemble: 2"),
        ("critic_disagreement", "{ensemble: 4}", None),
        ("quantile_calibration_error", "{quantiles: 4}", None),
    ],
)
def test_a_gate_on_what_the_head_does_not_measure(
    text: str, metric: str, head: str, needed: str | None
) -> None:
    text = with_algorithm(text, f"{{preset: vapo, critic_head: {head}}}")
    found = problems(text.replace(GATE, f"gate: {{metric: {metric}, at_most: 0.2}}"))
    if needed is None:
        assert found == []
    else:
        [problem] = found
        assert problem.endswith(f"set head: {{{needed}}}, or leave the gate out")


@every(
    ("algorithm", "message"),
    [
        ("{preset: ppo, critic_head: {quantiles: 8}}",
         "value_clip_range=0.2 clips around one value, and critic_head={quantiles: 8} predicts 8; set value_clip_range: null"),
        ("{preset: vapo, critic_head: {quantiles: 8, ensemble: 2}}",
         "quantiles=8 and ensemble=2 are two forms of a head; leave one of them out"),
        ("{preset: vapo, critic_head: {ensemble: 2, huber: 1.0}}", "huber=1 is about quantiles, and there are none; leave huber out"),
        ("{preset: vapo, critic_head: {quantiles: 8}, mask_agreed_share: 0.2}",
         "mask_agreed_share=0.2 asks where several values agree, and critic_head={quantiles: 8} is no ensemble; set critic_head: "
         "{ensemble: 2}, or leave mask_agreed_share out"),
        ("{preset: vapo, shared_trunk: true, critic_head: {ensemble: 2}}",
         "critic_head={ensemble: 2} is about a critic of its own, and shared_trunk: true has a head on the policy's trunk; leave "
         "critic_head out"),
        ("{preset: grpo, critic_head: {ensemble: 2}}",
         "critic_head={ensemble: 2} is about a critic of its own, and advantage=group_normalised has none; leave critic_head out"),
        ("{preset: vapo, shared_trunk: true, freeze_critic: all}",
         "freeze_critic=all is about a critic of its own, and shared_trunk: true has none; leave freeze_critic out"),
        ("{preset: vapo, freeze_critic: all, critic_steps: 2}",
         "critic_steps=2 is about a critic that learns, and freeze_critic=all lets none learn; set critic_steps: 1, or "
         "freeze_critic: attention"),
        ("{preset: vapo, freeze_critic: all, critic_first: true}",
         "critic_first=true is about a critic that learns, and freeze_critic=all lets none learn; set critic_first: false, or "
         "freeze_critic: attention"),
        ("{preset: vapo, freeze_critic: all, policy_starts_at: 3}",
         "policy_starts_at=3 is about a critic that learns, and freeze_critic=all lets none learn; set policy_starts_at: 0, or "
         "freeze_critic: attention"),
    ],
)  # fmt: skip
def test_switches_that_contradict_the_form_are_refused(text: str, algorithm: str, message: str) -> None:
    assert any(message in problem for problem in problems(with_algorithm(text, algorithm)))


FROZEN = "{preset: vapo, freeze_critic: all}"


@every(
    ("more", "message"),
    [
        ("    critic_optimizer: carry\n",
         "critic_optimizer: carry goes on with a critic's optimiser, and algorithm.freeze_critic=all has none; leave "
         "critic_optimizer out"),
        ("    guards: [{metric: value_loss, above: 9}]\n",
         "value_loss is measured only where the critic learns, and freeze_critic=all lets none learn; leave the guard out"),
        ("    guards: [{metric: critic_disagreement, above: 9}]\n",
         "critic_disagreement is measured only where the critic is an ensemble; set algorithm.critic_head: {ensemble: 2}, or leave "
         "the guard out"),
        ("    guards: [{metric: explained_variance, below: 0, action: freeze_policy}]\n",
         "freeze_policy lets the critic learn alone, and this stage has no critic of its own that learns"),
    ],
)  # fmt: skip
def test_what_a_frozen_critic_cannot_do_is_refused(text: str, more: str, message: str) -> None:
    found = problems(with_algorithm(text, FROZEN, more))
    assert any(message in problem for problem in found), found


def test_a_new_head_is_not_frozen(text: str) -> None:
    fresh = with_algorithm(text, FROZEN).replace("    critic: value\n", "    fresh_critic: sft\n")
    assert fresh != with_algorithm(text, FROZEN)
    assert any(
        "algorithm.freeze_critic=all keeps the critic as it starts, and fresh_critic=sft starts with a new head that has learned "
        "nothing; name a value_pretraining stage as critic, or use freeze_critic: none" in problem
        for problem in problems(fresh)
    )


def test_a_frozen_critic_has_no_learning_rate(text: str) -> None:
    stage = parse_recipe(with_algorithm(text, FROZEN)).stages["policy"]
    assert isinstance(stage, PolicyOptimization)
    assert stage.critic_learning_rate is None
    assert stage.algorithm.reads_critic and not stage.algorithm.trains_critic
