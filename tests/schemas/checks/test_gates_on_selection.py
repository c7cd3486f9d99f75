"""No gate judges the validation rows that picked the best checkpoint."""

import pytest

from vantage.schemas.kinds import KINDS
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.records.metrics import gate_metric_names, headline_metric_names


@pytest.mark.parametrize(
    ("old", "stage", "metric", "instead"),
    [
        ("metric: explained_variance", "value", "validation_explained_variance", "explained_variance"),
        ("metric: pair_accuracy", "reward", "validation_pair_accuracy", "pair_accuracy"),
    ],
)
def test_a_gate_on_validation_is_refused(text: str, old: str, stage: str, metric: str, instead: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text.replace(old, f"metric: {metric}"))
    [problem] = str(caught.value).splitlines()
    said = f"stages.{stage}.gate.metric: '{metric}' is measured on what chose the best, so that it is optimistic; use one of: "
    assert said in problem
    assert instead in problem.split("use one of: ")[1].split(", ")


def test_every_stage_that_selects_has_a_metric_of_the_same_on_test() -> None:
    for kind in KINDS:
        assert not any(name.startswith("validation_") for name in gate_metric_names(kind))
    assert {"test_score"} <= gate_metric_names("policy_optimization") & gate_metric_names("best_of_n")
    assert "validation_score" in headline_metric_names("policy_optimization")
