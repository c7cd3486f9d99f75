"""Compare the loader with the JSON schema, for every recipe and sweep that a test of ``tests/schemas`` loads.

What the loader takes, the schema takes. What it refuses for one field by itself (its type, its range, an unknown or missing
key), the schema refuses. What it refuses for another reason, no schema has to know; ``RULES`` and ``NO_FIELDS`` name these.
"""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ParamSpec

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vantage.schemas import sweep
from vantage.schemas.loading import recipe_file as loading
from vantage.schemas.loading.json_schema import recipe_schema, sweep_schema
from vantage.schemas.loading.overrides import Override, apply_overrides
from vantage.schemas.loading.selections import with_selections
from vantage.schemas.problems import Path, Problem, RecipeError
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.sweep import Sweep

P = ParamSpec("P")
Applied = tuple[Any, dict[Path, Override], list[Problem]]
Validated = tuple[Sweep | None, list[Problem]]

SAID = {
    "RewardTerm._is_of_one_kind",
    "MissingEos._one_of_two",
    "Gate._one_bound",
    "Guard._one_condition",
    "RewardModelling._pairs_or_rankings",
    "DirectPreferenceOptimization._pairs_or_responses",
    "Judge._of_one_kind",
    "PreferenceCollection._prompts_with_judge_or_demonstrations",
    "Publication._after_needs_an_alias",
    "RolloutCorrection._something_is_bounded",
    "Signing._one_place",
}
"""Rules over several fields that the schema says too, at least where a field is there that should not be, or is not."""

RULES = {
    "ScoreRange._bounds_something": "one of two fields, and an order of numbers",
    "ScoreRule._an_offset_is_not_whitened_away": "a field that must be absent where another has one certain value",
    "NamedScoresTerm._named_scores_have_rules_of_their_own": "the same, of several fields",
    "SteppedTerm._steps_are_not_whitened": "the same",
    "VerifierTerm._named_scores_of_steps_are_not_whitened": "the same",
    "LengthPenalty._fields_fit_the_penalty": "the same",
    "StepEnds._one_of_two": "exactly one of two, in a part of a term",
    "Reward._a_whitened_score_is_not_replaced": "the same, of parts of terms",
    "Algorithm._scores_that_are_normalised_each_have_nothing_added": "a field that must be absent where another has one certain value",
    "Publication._approve_needs_an_alias": "a field that must be there where another has one certain value",
    "Split._shares_leave_training_rows": "a sum of numbers",
    "Split._a_test_set_has_test_rows_alone": "a field that must be absent where another has one certain value",
    "Data._a_test_set_trains_nothing": "the same, of a part of the dataset",
    "Data._a_dataset_of_the_hub_is_loaded": "what the text of one field means for another",
    "NearDuplicates._names_are_different": "equal values in different items",
    "Data._templates_make_text": "what a text of one field means for another",
    "Generation._stops_are_different": "equal values in different items",
    "Labels._each_means_one_thing": "equal values in different fields",
    "PolicyEvaluation._judges_of_two_kinds": "equal kinds of value in two fields",
    "PreferenceCollection._a_model_compares_two_responses": "a number that another field's kind decides",
    "BenchmarkEvaluation._one_process_measures": "numbers of another part of the stage",
    "Verifier._one_group": "the groups of a regular expression",
    "ModelTerm._wrong_needs_a_verifier": "a field that is read in another kind of term alone",
    "Judge._a_model_is_asked_about_both_responses": "what stands in a text, and equal values in a list",
    "OtherModel._only_a_registered_model_may_be_missing": "what the text of one field means for another",
    "Verifier._fields_fit_the_source": "a field that another's value leaves without a reader",
    "BuiltinVerifier._fields_fit_the_source": "a field that another's value leaves without a reader",
    "LengthVerifier._bounds_bound": "one number above another",
    "FormatVerifier._tags_differ": "equal values in different items",
    "Budget._bounds_something": "one of two fields, or both",
    "CalledServer._a_key_is_masked": "how the text of a field begins and ends",
    "CalledServer._a_header_has_a_key": "a field that must be there where another is",
    "CalledServer._the_query_holds_no_key": "a part of a text",
    "JudgeServer._the_request_is_bounded": "values at any depth",
    "JudgeServer._the_scale_ascends": "one number is below another",
    "JudgeServer._the_prompt_shows_the_response": "a part of a text",
    "JudgeServer._the_request_is_ours": "names of fields of any name",
    "JudgeServer._a_cost_has_a_price": "a field that must be there where a part of another is",
    "RewardServer._names_differ": "equal values in different items",
    "JudgingModel._the_scale_ascends": "one number is below another",
    "JudgingModel._the_prompt_shows_the_response": "a part of a text",
    "JudgingModel._unreadable_answers_can_occur": "a number that is not another, where a field is there",
    "AnsweredTerm._rules_are_of_the_servers_scores": "names in one part that are those in another",
    "Reward._term_names_are_unique": "equal values in different items",
    "Resources._one_gpu_for_each_rank": "one number equals another",
    "NodeRange._in_order": "one number is below another",
    "PolicyOptimization._what_is_sampled_ahead_is_corrected": "values of other parts of the stage",
    "ValuePretraining._what_is_sampled_ahead_is_sampled_here": "values of other parts of the stage",
    "SampledAhead._vllm_samples_when_it_is_asked": "one value of a field against another's",
    "Sampling._vllm_is_served": "one value of a field against another's",
    "Rollouts._one_process_samples_with_vllm": "fields of two parts of the stage",
    "RolloutCollection._one_process_samples_with_vllm": "fields of two parts of the stage",
    "PreferenceCollection._one_process_samples_with_vllm": "fields of two parts of the stage",
    "PolicyEvaluation._one_process_samples_with_vllm": "fields of two parts of the stage",
    "Rollouts._minibatches_divide_the_batch": "one number divides another",
    "ValuePretraining._groups_divide_the_batch": "one number divides another",
    "PolicyOptimization._groups_divide_the_batch": "one number divides another",
    "Gate._extends_by_an_amount": "a field that must be there where another has one certain value",
    "Stage._a_gate_extends_what_trains": "a field of a part that other parts may have",
    "Training._a_gate_extends_what_trains": "fields of two parts of the stage",
    "Training._a_kept_state_can_be_trained_further": "one number divides another",
    "PolicyOptimization._no_rollout_ahead_of_a_kept_state": "values of other parts of the stage",
    "Training._compiled_layers_are_whole": "fields of two parts of the stage",
    "Training._eight_bit_states_are_whole": "fields of two parts of the stage",
    "Training._compiled_layers_stay": "fields of two parts of the stage",
    "Training._eight_bit_states_stay": "fields of two parts of the stage",
    "Resources._what_is_cut_is_not_offloaded": "fields of two parts of the stage",
    "ValuePretraining._a_kept_optimizer_is_plain": "one value of a field against another's",
    "ValuePretraining._an_optimizer_is_kept_whole": "fields of two parts of the stage",
    "PolicyOptimization._only_a_pretrained_critic_has_an_optimizer": "what a preset's name stands for",
    "ValuePretraining._fresh_responses_are_whole_groups": "one number divides another",
    "PolicyOptimization._baselines_made_beforehand_are_named": "what a preset's name stands for",
    "Algorithm._memory_has_a_range": "one number is above another",
    "Algorithm._tracked_scores_have_one_unit": "what a preset's name stands for",
    "ValuePretraining._the_exact_kl_reads_whole_weights": "fields of two parts of the stage",
    "PolicyOptimization._the_exact_kl_reads_whole_weights": "fields of two parts of the stage",
    "PolicyOptimization._the_policy_learns": "one number against another",
    "BestOfN._minibatches_divide_the_batch": "one number divides another",
    "PolicyOptimization._one_critic_where_one_is_read": "what a preset's name stands for",
    "PolicyOptimization._one_step_without_importance_ratio": "what a preset's name stands for",
    "PolicyOptimization._kl_horizon_exceeds_a_fifth_of_the_batch": "one number times five",
    "PolicyOptimization._ptx_needs_data": "what a preset's name stands for",
    "Algorithm._positive_nll_needs_a_rule": "what a preset's name stands for",
    "Algorithm._critic_switches_need_gae": "what a preset's name stands for",
    "Algorithm._a_critic_of_its_own_is_frozen_or_learns_apart": "what a preset's name stands for",
    "Algorithm._the_critic_is_switched_or_blended": "what a preset's name stands for",
    "DirectPreferenceOptimization._no_unread_reference": "one value of a field against another's",
    "DirectPreferenceOptimization._a_target_margin_for_simpo": "a field that must be there where another has one certain value",
    "DirectPreferenceOptimization._smoothed_where_it_is_logistic": "one value of a field against another's",
    "DirectPreferenceOptimization._normalised_once": "one value of a field against another's",
    "Distillation._groups_divide_the_batch": "one number divides another",
    "TeacherServer._the_address_is_the_servers": "how the text of a field ends",
    "Distillation._there_is_one_teacher": "exactly one of two fields",
    "Distillation._a_server_gives_one_logprob_a_token": "a field that must have one value where another is there",
    "Distillation._the_teacher_is_another_policy": "two fields name different things",
    "Distillation._the_teacher_is_read_whole": "ranks and GPUs follow from several fields",
    "KahnemanTverskyOptimization._a_batch_has_mismatched_pairs": "one number of a field that others have too",
    "Members._halves_come_in_pairs": "one field against another's value",
    "RewardModelling._members_are_not_divided_again": "fields that exclude each other, one of which the loader writes",
    "WatchedRollouts._the_watch_is_independent": "one name equals another",
    "Ensemble._k_is_of_one_combination": "one field against another's value",
    "Reward._an_ensemble_has_members": "a number of items of one kind, and a field of them",
    "Guard._a_freeze_has_an_end": "one field against another's value",
    "Algorithm._k1_is_not_a_loss": "what a preset's name stands for",
    "Algorithm._kl_targets_need_coefficients": "what a preset's name stands for",
    "Algorithm._uniform_groups_need_several_samples": "what a preset's name stands for",
    "Algorithm._what_is_corrected_is_measured": "what a preset's name stands for",
    "Algorithm._shared_trunk_needs_gae": "what a preset's name stands for",
    "Algorithm._the_surrogate_has_what_it_bounds": "what a preset's name stands for",
    "Algorithm._covariances_select_from_the_clipped_surrogate": "what a preset's name stands for",
    "Algorithm._the_kl_has_an_unbiased_gradient": "what a preset's name stands for",
    "Algorithm._the_entropy_coefficient_begins_in_its_range": "one number is above another",
    "Algorithm._the_head_fits_the_critic": "what a preset's name stands for",
    "Algorithm._a_frozen_critic_does_not_learn": "what a preset's name stands for",
    "PolicyOptimization._a_frozen_critic_was_trained": "what a preset's name stands for",
    "CriticHead._one_form": "one field against another's value",
    "PromptSelection._the_range_is_not_empty": "one number is above another",
}
"""Rules that no schema can say (or none that an editor could explain) → why."""

NO_FIELDS = (
    "names that other parts of the recipe give (vantage.schemas.checks.names), and rings of them",
    "metrics, which depend on the judge",
    "agreement of a critic with its policy stages (vantage.schemas.checks.agreement)",
    "agreement of a stage with the responses that it reads (vantage.schemas.checks.collected_rollouts)",
    "equal questions to two servers (vantage.schemas.checks.same_questions)",
    "files: whether they are there, and of what kind; `?`, which is to be given by --set",
    "what YAML alone can write: tags, anchors, a key twice",
    "2.0 for a whole number: JSON knows no difference between 2.0 and 2",
    "the sweep's arms, which are overrides of a recipe",
)
"""What else the loader knows and no schema."""


@cache
def validator(of: type[BaseModel]) -> jsonschema.Draft7Validator:
    """Return the validator of recipes or of sweeps."""
    schema = recipe_schema() if of is Recipe else sweep_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    found: jsonschema.Draft7Validator = _Validator(schema)
    return found


def _any_of(
    validator: Any, alternatives: list[Any], instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """Do what jsonschema does, except that it lists all errors of each alternative, which is most of its time.

    Most parts of a recipe are those of the recipe before, so the answers about small ones are kept.
    """
    try:
        key = id(alternatives), repr(instance)  # schemas are kept for good, by `validator`
    except RecursionError:
        key = 0, ""
    accepts = _ACCEPTED.get(key) if key[1] else None
    if accepts is None:
        accepts = any(next(validator.descend(instance, each), None) is None for each in alternatives)
        if 0 < len(key[1]) < _MOST_CHARACTERS:
            _ACCEPTED[key] = accepts
    if not accepts:
        yield jsonschema.ValidationError(f"{instance!r} is not valid under any of the given schemas")


_ACCEPTED: dict[tuple[int, str], bool] = {}
"""(alternatives, value) → whether one of them accepts it."""
_MOST_CHARACTERS = 300

_Validator = jsonschema.validators.extend(jsonschema.Draft7Validator, {"anyOf": _any_of})


def wrong_fields(of: type[BaseModel], plain: Any) -> list[str]:
    """Return pydantic's errors of single fields, without those that depend on types which JSON does not distinguish."""
    if of is Recipe:  # datasets that are selected are stages to pydantic
        plain = with_selections(plain).plain
    try:
        of.model_validate(plain)
    except ValidationError as error:
        return [
            f"{each['loc']}: {each['type']}"
            for each in error.errors(include_url=False)
            if each["type"] != "value_error" and not _is_whole(each) and not _counts_valid_items(each)
        ]
    return []


def _counts_valid_items(error: ErrorDetails) -> bool:
    """Return whether pydantic reports a list as too short because an item of it breaks a rule."""
    return error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]


def _is_whole(error: ErrorDetails) -> bool:
    value = error["input"]
    return error["type"].startswith("int") and isinstance(value, float) and value.is_integer()


def compare(of: type[BaseModel], plain: Any, *, loads: bool) -> list[str]:
    """Fail where loader and schema differ about plain values; returns the wrong fields."""
    if not isinstance(plain, dict):
        return []
    wrong = wrong_fields(of, plain)
    accepts = validator(of).is_valid(plain)
    if loads:
        assert accepts, f"the schema refuses what loads: {_problems_by_schema(of, plain)}"
    if wrong:
        assert not accepts, f"the schema accepts what is refused: {wrong}"
    errors = [] if loads or wrong or accepts else list(validator(of).iter_errors(plain))
    for error in errors:  # sources and rules refuse the recipe, so the schema may refuse a field of it
        assert error.absolute_path, (
            f"the schema refuses what has no wrong field: {_problems_by_schema(of, plain)}"
        )
    return wrong


def _problems_by_schema(of: type[BaseModel], plain: Any) -> list[str]:
    return [
        f"{list(error.absolute_path)}: {error.message[:300]}" for error in validator(of).iter_errors(plain)
    ]


def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare whatever is loaded until the generator goes on."""
    last: list[Any] = []

    def noted(apply: Callable[P, Applied]) -> Callable[P, Applied]:
        def run(*arguments: P.args, **named: P.kwargs) -> Applied:
            result = apply(*arguments, **named)
            last[:] = [copy.deepcopy(result[0])]
            return result

        return run

    def compared(parse: Callable[P, Recipe]) -> Callable[P, Recipe]:
        def run(*arguments: P.args, **named: P.kwargs) -> Recipe:
            try:
                recipe = parse(*arguments, **named)
            except RecipeError:
                compare(Recipe, last[0], loads=False)
                raise
            compare(Recipe, last[0], loads=True)
            return recipe

        return run

    def compared_sweep(
        validate: Callable[[sweep._SweepFile], Validated],
    ) -> Callable[[sweep._SweepFile], Validated]:
        def run(place: sweep._SweepFile) -> Validated:
            value, problems = validate(place)
            compare(Sweep, place.reading.value, loads=not problems)
            return value, problems

        return run

    with monkeypatch.context() as patched:
        patched.setattr(loading, "apply_overrides", noted(apply_overrides))
        patched.setattr(loading, "_parse", compared(loading._parse))
        patched.setattr(sweep, "_validate", compared_sweep(sweep._validate))
        yield
