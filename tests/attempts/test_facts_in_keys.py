"""A stage key holds the date of chat templates, and that padding learns, only for models that are touched by it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.jobs import facts_in_key, key_parts_of
from vantage.runs.resolving import resolve_rates
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.recipe import ResolvedRecipe

RECIPE = """
recipe: dated
model: {source: MODEL}
models:
  other: {source: OTHER}
data:
  demos: {source: rows.jsonl}
  prompts: {source: rows.jsonl}
stages:
  sft: {kind: sft, data: demos, learning_rate: 1.0e-4}
  judged: {kind: evaluation, candidate: sft, baseline: other, judge: {verifier: arithmetic}, prompts: prompts}
"""
CLOCK = "{{ strftime_now('%d %b') }}{{ messages[0].content }}"
NAMED = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b') %}{% endif %}{{ date_string }}"
PLAIN = "{{ messages[0].content }}"
OWN_PAD = {"eos_token": "</s>", "pad_token": "<pad>"}


def _model(folder: Path, template: str | None, roles: Mapping[str, str] = OWN_PAD) -> Path:
    """Write what the facts are read from; no weights."""
    folder.mkdir()
    settings = {**roles, **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def _recipe(tmp_path: Path, *overrides: str, other: str = "builtin:tiny") -> ResolvedRecipe:
    text = RECIPE.replace("MODEL", str(tmp_path / "model")).replace("OTHER", other)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "response": "2"}\n')
    return resolve_rates(parse_recipe(text, overrides=list(overrides), folder=tmp_path))[0]


def _extra(recipe: ResolvedRecipe, step: str, **known: Any) -> dict[str, Any]:
    roles = {"sft": ("init", "data"), "judged": ("candidate", "baseline", "prompts")}[step]
    extra: dict[str, Any] = key_parts_of(recipe, step, dict.fromkeys(roles, "a" * 64), **known)["extra"]
    return extra


@pytest.mark.parametrize(
    ("template", "overrides", "date"),
    [
        (PLAIN, (), None),
        (PLAIN, ("model.date=2031-02-01",), None),
        (None, ("model.date=2031-02-01",), None),
        (CLOCK, (), "2024-07-26"),
        (CLOCK, ("model.date=2031-02-01",), "2031-02-01"),
        (CLOCK, ("model.chat=false",), None),
        (NAMED, (), None),  # it never asked the clock: earlier versions named the default date
        (NAMED, ("model.date=2031-02-01",), "2031-02-01"),
    ],
)
def test_the_date_is_in_the_key_of_a_model_whose_template_asks_for_it(
    tmp_path: Path, template: str | None, overrides: tuple[str, ...], date: str | None
) -> None:
    _model(tmp_path / "model", template)
    recipe = _recipe(tmp_path, *overrides)
    assert _extra(recipe, "sft") == {"chat": recipe.model.chat, **({"date": date} if date else {})}


def test_a_template_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    _model(tmp_path / "model", None)
    (tmp_path / "model" / "chat_template.jinja").write_text(CLOCK)
    assert _extra(_recipe(tmp_path), "sft")["date"] == "2024-07-26"


def test_a_template_of_a_gguf_file_counts(tmp_path: Path) -> None:
    _model(tmp_path / "model", PLAIN)
    file = tmp_path / "model.gguf"
    for template, told in ((PLAIN, {"chat": None}), (CLOCK, {"chat": None, "date": "2024-07-26"})):
        file.write_bytes(b"GGUF\3\0\0\0" + template.encode() + bytes(100))
        recipe = _recipe(tmp_path, f"model.source=gguf:{file}")
        assert _extra(recipe, "sft") == told


def test_only_stages_behind_which_the_model_stands_name_the_date(tmp_path: Path) -> None:
    _model(tmp_path / "model", PLAIN)
    recipe = _recipe(tmp_path, other=str(_model(tmp_path / "other", CLOCK)))
    assert "date" not in _extra(recipe, "sft")
    assert _extra(recipe, "judged")["date"] == "2024-07-26"


def test_of_a_model_on_the_hub_another_date_than_the_default_is_in_the_key(tmp_path: Path) -> None:
    _model(tmp_path / "model", PLAIN)
    hub = f"model.source=hub:org/name@{'a' * 40}"
    assert "date" not in _extra(_recipe(tmp_path, hub), "sft")
    assert _extra(_recipe(tmp_path, hub, "model.date=2031-02-01"), "sft")["date"] == "2031-02-01"


@pytest.mark.parametrize(
    ("roles", "is_another"),
    [
        (OWN_PAD, False),
        ({**OWN_PAD, "unk_token": "<unk>"}, False),
        ({"eos_token": "</s>"}, True),
        ({"eos_token": "</s>", "pad_token": "</s>"}, True),
        ({"eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"}, True),
    ],
)
def test_padding_by_another_token_is_in_the_key(
    tmp_path: Path, roles: Mapping[str, str], is_another: bool
) -> None:
    _model(tmp_path / "model", PLAIN, roles)
    expected = {"chat": None, **({"padding": "learns"} if is_another else {})}
    assert _extra(_recipe(tmp_path), "sft") == expected


def test_padding_named_in_the_former_file_counts(tmp_path: Path) -> None:
    _model(tmp_path / "model", PLAIN, {"eos_token": "</s>"})
    (tmp_path / "model" / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    assert "padding" not in _extra(_recipe(tmp_path), "sft")


def test_a_recorded_key_is_made_again_without_the_source(tmp_path: Path) -> None:
    _model(tmp_path / "model", CLOCK, {"eos_token": "</s>"})
    recipe = _recipe(tmp_path)
    recorded = {"extra": _extra(recipe, "sft")}
    former = {"extra": {"chat": None}}  # a record of a version that named neither
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    for parts in (recorded, former):
        assert _extra(recipe, "sft", facts=facts_in_key(parts)) == parts["extra"]


def test_a_model_behind_another_stage_counts(tmp_path: Path) -> None:
    """``judged`` reads the model that ``sft`` has trained."""
    _model(tmp_path / "model", CLOCK)
    assert _extra(_recipe(tmp_path), "judged")["date"] == "2024-07-26"
