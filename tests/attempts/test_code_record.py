"""No stage's code changes without a word on its numbers."""

import pytest

from tests.attempts.code_record import (
    Written,
    present,
    read,
    recorded,
    revisions,
    unrecorded,
)

CODE = {
    "sft": {"vantage.tasks.sft": "aa", "vantage.models.heads": "bb"},
    "dpo": {"vantage.tasks.dpo": "cc", "vantage.models.heads": "bb"},
}
WRITTEN: Written = {
    "revisions": {"sft": 1, "dpo": 1},
    "modules": {"vantage.tasks.sft": "aa", "vantage.tasks.dpo": "cc", "vantage.models.heads": "bb"},
    "reasons": dict.fromkeys(
        ("vantage.tasks.sft", "vantage.tasks.dpo", "vantage.models.heads"), "same numbers: first written"
    ),
}


def test_the_code_is_the_recorded_one() -> None:
    changed = unrecorded(read(), present())
    told = "\n".join(
        f"  {module}, run by {', '.join(kinds) or 'nothing now'}" for module, kinds in changed.items()
    )
    assert not changed, (
        f"changed since tests/attempts/code_record.json was written:\n{told}\nraise the revisions of the kinds whose "
        'numbers change, then: python tests/attempts/code_record.py "same numbers: ..." (or what is different)'
    )
    assert read()["revisions"] == revisions()


def test_a_changed_module_is_told_with_all_that_run_it() -> None:
    assert unrecorded(WRITTEN, CODE) == {}
    changed = {
        "sft": CODE["sft"] | {"vantage.models.heads": "b2"},
        "dpo": CODE["dpo"] | {"vantage.models.heads": "b2"},
    }
    assert unrecorded(WRITTEN, changed) == {"vantage.models.heads": ["sft", "dpo"]}
    new = {"sft": CODE["sft"] | {"models.lora": "dd"}, "dpo": {"vantage.models.heads": "bb"}}
    assert unrecorded(WRITTEN, new) == {"models.lora": ["sft"], "vantage.tasks.dpo": []}


def test_it_is_recorded_as_the_same_or_with_a_raised_revision() -> None:
    changed = {"sft": CODE["sft"] | {"vantage.tasks.sft": "a2"}, "dpo": CODE["dpo"]}
    same = recorded(WRITTEN, changed, WRITTEN["revisions"], reason="same numbers: renamed")
    assert same["modules"]["vantage.tasks.sft"] == "a2"
    assert same["reasons"] == {**WRITTEN["reasons"], "vantage.tasks.sft": "same numbers: renamed"}

    with pytest.raises(ValueError, match=r"^sft run changed code under an unchanged revision; raise it"):
        recorded(WRITTEN, changed, WRITTEN["revisions"], reason="the loss is summed in float64")
    raised = recorded(WRITTEN, changed, {"sft": 2, "dpo": 1}, reason="the loss is summed in float64")
    assert raised["revisions"] == {"sft": 2, "dpo": 1}
    assert unrecorded(raised, changed) == {}


@pytest.mark.parametrize("reason", ["", "same numbers:", "  "])
def test_a_record_wants_a_reason(reason: str) -> None:
    with pytest.raises(ValueError, match="say why"):
        recorded(WRITTEN, CODE, WRITTEN["revisions"], reason=reason)
