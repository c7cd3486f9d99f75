"""No result of a stage changes under an unchanged revision."""

from math import nan
from typing import get_args

import pytest
import torch

from tests.attempts.golden_digests import (
    RECORD,
    Golden,
    Numbers,
    Record,
    golden,
    read,
    revisions,
    this_platform,
    unlike,
    updated,
    written,
)
from tests.tasks.golden_results import Results
from tests.tasks.golden_runs import RUNS, kinds_behind
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.presets import PresetName

HERE, ELSEWHERE = "x86_64 AVX2, torch 2.13.0", "aarch64 NEON, torch 2.13.0"
RUN, OTHER = "sft: LoRA", "merge_policy"
RECORDED: Record = {
    "revisions": {"sft": 3, "merge_policy": 1},
    "numbers": {RUN: {"loss": 2.0, "texts": "ab"}, OTHER: {"norm": 5.0}},
    "digests": {HERE: {RUN: "aa", OTHER: "bb"}, ELSEWHERE: {RUN: "cc", OTHER: "dd"}},
}
SAME = {RUN: Golden(RECORDED["numbers"][RUN], "aa"), OTHER: Golden(RECORDED["numbers"][OTHER], "bb")}
CHANGED = SAME | {RUN: Golden({"loss": 2.1, "texts": "ab"}, "a2")}
BITS = SAME | {RUN: Golden(RECORDED["numbers"][RUN], "a2")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    torch.set_num_threads(1)
    return Results(tmp_path_factory.mktemp("golden"))


FAST = {"", *get_args(PresetName)}
"""The runs of a kind without settings and of the presets; the others are left to ``make test-all``."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each.partition(": ")[2] in FAST else pytest.mark.slow) for each in RUNS],
)
def test_a_run_makes_what_is_recorded(name: str, results: Results) -> None:
    """A run makes the recorded numbers on every platform, and the recorded bits on platforms that have some."""
    if name.startswith("benchmark_evaluation"):
        pytest.importorskip("lm_eval", reason="pip install -e '.[lm-eval]'")
    record, found = read(), golden(results.of(name))
    assert unlike(found.numbers, record["numbers"][name]) == []
    recorded = record["digests"].get(this_platform(), {}).get(name, found.digest)
    assert found.digest == recorded, (
        f"the bits have changed: undo it, or raise the revision of {' or '.join(sorted(kinds_behind(name)))} and run "
        "python -m tests.attempts.golden_digests"
    )


def test_every_kind_and_preset_has_a_run_and_the_record_is_of_these_revisions() -> None:
    record = read()
    assert {run.kind for run in RUNS.values()} == KINDS.keys()
    assert {f"policy_optimization: {name}" for name in get_args(PresetName)} < RUNS.keys()
    assert record["numbers"].keys() == RUNS.keys()
    # a platform that has not seen a new curve has no digest of a run that reports it
    assert all(digests.keys() <= RUNS.keys() for digests in record["digests"].values())
    assert any(digests.keys() == RUNS.keys() for digests in record["digests"].values())
    assert record["revisions"] == revisions()
    assert RECORD.read_text() == written(record)


def test_a_curve_that_the_record_does_not_have_is_no_changed_result() -> None:
    """If all else has its bits, a new curve is added to the record, for this platform alone."""
    numbers: Numbers = {**RECORDED["numbers"][RUN], "mean of entropy": 0.5}
    found = SAME | {RUN: Golden(numbers, "a2", known="aa")}
    record = updated(RECORDED, found, HERE, RECORDED["revisions"])
    assert record["numbers"][RUN] == numbers
    assert record["digests"] == {HERE: {RUN: "a2", OTHER: "bb"}, ELSEWHERE: {OTHER: "dd"}}
    for other in (Golden(numbers, "a2", known="a3"), Golden({**numbers, "loss": 2.1}, "a2", known="aa")):
        with pytest.raises(ValueError, match="the revision of sft is as before"):
            updated(RECORDED, found | {RUN: other}, HERE, RECORDED["revisions"])


def test_equal_results_leave_the_record_as_it_is() -> None:
    assert updated(RECORDED, SAME, HERE, RECORDED["revisions"]) == RECORDED


@pytest.mark.parametrize("found", [CHANGED, BITS])
def test_a_changed_result_is_refused_until_a_revision_is_raised(found: dict[str, Golden]) -> None:
    with pytest.raises(
        ValueError, match=r"^sft: LoRA: .*; the revision of sft is as before: undo the change, or raise"
    ):
        updated(RECORDED, found, HERE, RECORDED["revisions"])
    with pytest.raises(ValueError, match=r"^sft: LoRA: "):  # whatever happens to another kind
        updated(RECORDED, found, HERE, {"sft": 3, "merge_policy": 2})
    raised = updated(RECORDED, found, HERE, {"sft": 4, "merge_policy": 1})
    assert raised["revisions"] == {"sft": 4, "merge_policy": 1}
    assert raised["numbers"] == {name: each.numbers for name, each in found.items()}
    # nobody knows yet what the new code makes elsewhere
    assert raised["digests"] == {HERE: {RUN: "a2", OTHER: "bb"}, ELSEWHERE: {OTHER: "dd"}}


def test_a_run_may_change_with_the_kind_that_made_its_input() -> None:
    found = SAME | {OTHER: Golden({"norm": 6.0}, "b2")}
    with pytest.raises(
        ValueError,
        match=r"^merge_policy: norm: 5.0 in the record, 6.0 now; .*; the revision of merge_policy or sft",
    ):
        updated(RECORDED, found, HERE, RECORDED["revisions"])
    assert updated(RECORDED, found, HERE, {"sft": 4, "merge_policy": 1})["numbers"][OTHER] == {"norm": 6.0}


def test_another_platform_is_added_if_its_numbers_are_alike() -> None:
    rounded = SAME | {RUN: Golden({"loss": 2.001, "texts": "ab"}, "a2")}
    added = updated(RECORDED, rounded, "another", RECORDED["revisions"])
    assert added["numbers"] == RECORDED["numbers"]
    assert added["digests"] == RECORDED["digests"] | {"another": {RUN: "a2", OTHER: "bb"}}
    with pytest.raises(ValueError, match="loss: 2.0 in the record, 2.1 now"):
        updated(RECORDED, CHANGED, "another", RECORDED["revisions"])


def test_a_new_run_is_recorded_and_one_that_is_gone_is_not() -> None:
    before: Record = {
        **RECORDED,
        "numbers": {OTHER: {"norm": 5.0}, "gone": {}},
        "digests": {HERE: {OTHER: "bb"}},
    }
    after = updated(before, SAME, HERE, RECORDED["revisions"])
    assert after["numbers"] == RECORDED["numbers"]
    assert after["digests"] == {HERE: {RUN: "aa", OTHER: "bb"}}


def test_numbers_are_alike_up_to_rounding() -> None:
    recorded: Numbers = {"loss": 2.0, "gap": 0.0, "texts": "ab", "none": None, "undefined": nan}
    assert unlike({**recorded, "loss": 2.005, "gap": 9e-4}, recorded) == []
    assert unlike({**recorded, "loss": 2.01}, recorded) == ["loss: 2.0 in the record, 2.01 now"]
    assert unlike({**recorded, "texts": "ac", "none": 0.0}, recorded) == [
        "none: None in the record, 0.0 now",
        "texts: ab in the record, ac now",
    ]
    missing = {name: value for name, value in recorded.items() if name != "gap"}
    assert len(unlike(missing, recorded)) == len(unlike(recorded, missing)) == 1
