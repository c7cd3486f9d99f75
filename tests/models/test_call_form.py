"""A turn that calls tools is given to a chat template in the form that the template reads."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from vantage.models.call_form import CallForm

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
AS_TEXT = {"type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}


def turn(content: str, *calls: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        (CallForm(), turn("", CALL), turn("", CALL)),
        (CallForm(is_null=True), turn("", CALL), {**turn("", CALL), "content": None}),
        (CallForm(is_null=True), turn("I add.", CALL), turn("I add.", CALL)),
        (CallForm(is_null=True, is_text=True), turn(""), turn("")),
        (CallForm(is_text=True), turn("", CALL, CALL), turn("", AS_TEXT, AS_TEXT)),
        (CallForm(is_text=True), turn("", AS_TEXT), turn("", AS_TEXT)),
        (CallForm(is_text=True), turn("", CALL["function"]), turn("", AS_TEXT["function"])),  # type: ignore[arg-type]
    ],
)
def test_words_and_arguments_are_written_in_the_form(
    form: CallForm, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = json.dumps(given)
    assert form.of(given) == expected
    assert json.dumps(given) == before, "the row is unchanged"
