"""Switches of losses on pairs and of KTO are refused with a remedy or warned of by rule, and enter the stage's key."""

import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.support.packages import ROOT
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization
from vantage.schemas.recipe.unpaired import KahnemanTverskyOptimization
from vantage.schemas.steps import dependencies

RECIPE = """\
recipe: pairs
model: {{source: "builtin:tiny"}}
generation: {{max_prompt_tokens: 48, max_response_tokens: 64}}
data:
  demonstrations: {{source: "builtin:arithmetic/demonstrations"}}
  preferences: {{source: "builtin:arithmetic/preferences"}}
  labelled: {{source: "builtin:arithmetic/labelled_responses"}}
stages:
  sft: {{kind: sft, data: demonstrations}}
  learns: {{{learns}}}
"""


def direct(**fields: Any) -> DirectPreferenceOptimization:
    return DirectPreferenceOptimization.model_validate(
        {"kind": "dpo", "init": "sft", "data": "pairs", **fields}
    )


SIMPO = {"loss": "simpo", "beta": 2.0, "target_margin": 1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**SIMPO, "reference": "sft"}, "reference=sft is not read by loss=simpo, which compares with no other policy; leave reference out"),
        ({"loss": "orpo", "reference": "sft"}, "reference=sft is not read by loss=orpo"),
        ({"loss": "simpo", "beta": 2.0}, "target_margin is missing, and loss=simpo asks for a gap.*target_margin: 1"),
        ({"target_margin": 0.5}, "target_margin=0.5 is read by loss: simpo alone, and loss=dpo; leave target_margin out"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing=0.1 is read by loss: dpo or simpo, and loss=ipo; leave label_smoothing out"),
        ({"loss": "orpo", "label_smoothing": 0.1}, "label_smoothing=0.1 is read by loss: dpo or simpo, and loss=orpo"),
        ({**SIMPO, "length_normalised": True}, "length_normalised=true is what loss=simpo does in any case; leave length_normalised out"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"loss": "hinge"}, "'dpo', 'ipo', 'simpo' or 'orpo'"),
    ],
)  # fmt: skip
def test_combinations_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        direct(**fields)


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        direct(loss="orpo", reference="sft", target_margin=1.0, label_smoothing=0.1, length_normalised=True)
    text = str(caught.value)
    assert all(
        name in text
        for name in ("reference=sft", "target_margin=1", "label_smoothing=0.1", "length_normalised=true")
    )


def test_a_batch_of_kto_has_two_responses() -> None:
    with pytest.raises(
        ValidationError, match="batch_size=1 leaves no response to another prompt.*use 2 or more"
    ):
        KahnemanTverskyOptimization(kind="kto", init="sft", data="labelled", batch_size=1)


def test_a_recipe_that_uses_no_new_switch_has_its_former_json() -> None:
    assert (
        not {"loss", "target_margin", "label_smoothing", "length_normalised", "rounds", "round"}
        & direct().model_dump().keys()
    )
    used = direct(**SIMPO, label_smoothing=0.1).model_dump()
    assert (used["loss"], used["target_margin"], used["label_smoothing"]) == ("simpo", 1.0, 0.1)


@pytest.mark.parametrize(
    ("learns", "inputs"),
    [
        ("kind: dpo, init: sft, data: preferences", {"init": "sft", "reference": "sft", "data": "data.preferences"}),
        ("kind: dpo, loss: ipo, init: sft, reference: model, data: preferences", {"init": "sft", "reference": "model", "data": "data.preferences"}),
        ("kind: dpo, loss: simpo, beta: 2.0, target_margin: 1.0, init: sft, data: preferences", {"init": "sft", "data": "data.preferences"}),
        ("kind: dpo, loss: orpo, init: sft, data: preferences", {"init": "sft", "data": "data.preferences"}),
        ("kind: kto, init: sft, data: labelled", {"init": "sft", "reference": "sft", "data": "data.labelled"}),
    ],
)  # fmt: skip
def test_what_a_stage_reads_follows_from_its_loss(learns: str, inputs: dict[str, str]) -> None:
    recipe = parse_recipe(RECIPE.format(learns=learns))
    assert dependencies(recipe)["learns"] == inputs
    assert getattr(recipe.stages["learns"], "reference", None) == inputs.get("reference")


def test_a_dataset_of_pairs_has_no_labels_and_the_other_way_round() -> None:
    with pytest.raises(
        ValueError, match="reads labelled_responses, but builtin:arithmetic/preferences holds preferences"
    ):
        parse_recipe(RECIPE.format(learns="kind: kto, init: sft, data: preferences"))
    with pytest.raises(
        ValueError,
        match="reads preferences, but builtin:arithmetic/labelled_responses holds labelled_responses",
    ):
        parse_recipe(RECIPE.format(learns="kind: dpo, init: sft, data: labelled"))


def test_an_offloaded_reference_that_the_loss_does_not_read_is_refused() -> None:
    learns = "kind: dpo, loss: orpo, init: sft, data: preferences, resources: {offload: [reference]}"
    with pytest.raises(ValueError, match="this stage reads no reference; leave reference out"):
        parse_recipe(RECIPE.format(learns=learns))


@pytest.mark.parametrize(
    ("learns", "warned"),
    [
        ("kind: dpo, loss: simpo, target_margin: 0.05, init: sft, data: preferences", "stages.learns.beta: 0.1 is small for means .* simpo compares.*2 to 10"),
        ("kind: dpo, length_normalised: true, init: sft, data: preferences", "stages.learns.beta: 0.1 is small for means .* length_normalised compares.*5 to 10"),
    ],
)  # fmt: skip
def test_a_beta_for_sums_is_warned_of_where_means_are_compared(learns: str, warned: str) -> None:
    recipe = parse_recipe(RECIPE.format(learns=learns))
    found = [each for each in warnings(recipe, dependencies(recipe)) if "beta" in each]
    assert len(found) == 1
    assert re.search(warned, found[0])
    enough = parse_recipe(RECIPE.format(learns=learns + ", beta: 5.0"))
    assert not [each for each in warnings(enough, dependencies(enough)) if "beta" in each]


def test_the_values_of_the_authors_as_shown_are_stages_that_nothing_is_warned_of() -> None:
    page = (ROOT / "docs" / "preference_losses.md").read_text(encoding="utf-8")
    table = page.partition("| method | model | fields of the stage | source |")[2].partition("\n\n")[0]
    shown = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert [row[0] for row in shown] == ["SimPO"] * 4 + ["ORPO", "KTO"]
    for method, model, fields, source in shown:
        given = ", ".join(re.findall("`([^`]+)`", fields))
        data = "labelled" if method == "KTO" else "preferences"
        recipe = parse_recipe(RECIPE.format(learns=f"{given}, init: sft, data: {data}"))
        stage = recipe.stages["learns"].model_dump(mode="json")
        expected = yaml.safe_load(f"{{{given}}}")
        assert {name: stage[name] for name in expected} == expected, (method, model)
        assert not [each for each in warnings(recipe, dependencies(recipe)) if "learns" in each], method
        if ratio := re.search(r"(?:γ/β is|the same,) ([0-9.]+)", source):
            assert stage["target_margin"] == pytest.approx(float(ratio[1]) * stage["beta"])
