"""The resolved recipe has the fields of the written one, in their order, with nothing left open."""

import types
from typing import Union, get_args, get_origin

import pytest
from pydantic import ValidationError

from tests.support.every import every
from vantage.schemas.kind import Kind
from vantage.schemas.kinds import STAGES, resolve_work
from vantage.schemas.recipe.resolved import ResolvedSupervisedFineTuning, ResolvedValuePretraining
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning

CLOSED = {
    "sft": {"learning_rate"},
    "reward_model": {"learning_rate"},
    "dpo": {"learning_rate"},  # a loss may read no reference
    "kto": {"learning_rate", "reference"},
    "value_pretraining": {"learning_rate", "reference", "returns"},
    "policy_optimization": {"learning_rate", "reference"},
    "best_of_n": {"learning_rate"},
    "distillation": {"learning_rate"},
    "preference_collection": {"samples_per_prompt"},
    "rollout_collection": {"held_out_samples_per_prompt"},
    "prompt_selection": set(),
    "reward_evaluation": set(),
    "benchmark_evaluation": set(),
    "evaluation": set(),
}
"""Kind → what is written out before it runs."""


def may_be_none(annotation: object) -> bool:
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


@every("kind", STAGES.values())
def test_only_what_is_written_out_differs(kind: Kind) -> None:
    written, runs = kind.work.model_fields, kind.resolved_type.model_fields
    assert list(written) == list(runs)
    assert {
        name
        for name in written
        if may_be_none(written[name].annotation) and not may_be_none(runs[name].annotation)
    } == (CLOSED[kind.name])
    for name in written.keys() - CLOSED[kind.name]:
        assert (runs[name].annotation, runs[name].default) == (
            written[name].annotation,
            written[name].default,
        ), name
    assert kind.resolved_type._rules == kind.work._rules
    assert issubclass(kind.resolved_type, kind.work)


def test_what_is_open_does_not_run() -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        resolve_work(SupervisedFineTuning(kind="sft", data="demos"))


def test_what_runs_makes_the_same_json() -> None:
    written = SupervisedFineTuning(kind="sft", data="demos", learning_rate=1e-5, gate=())
    runs = resolve_work(written)
    assert type(runs) is ResolvedSupervisedFineTuning
    assert runs.model_dump_json() == written.model_dump_json()
    assert resolve_work(runs) is runs


def test_collected_rollouts_leave_a_share_of_fresh_responses() -> None:
    """A quarter of 12 responses is fresh, and all of them are where no rollouts were collected."""
    for rollouts, fresh in (("collected", 3), (None, 12)):
        stage = ResolvedValuePretraining.model_construct(batch_size=12, rollouts=rollouts, fresh_share=0.25)
        assert stage.fresh_responses == fresh
