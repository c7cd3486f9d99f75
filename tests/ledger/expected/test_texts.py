"""Nested values become params with dotted names, and texts longer than MLflow takes are cut."""

from vantage.ledger.expected.texts import fit_tag, flatten


def test_nested_values_become_dotted_params_written_as_in_json() -> None:
    recipe = {
        "seed": 17,
        "stages": {
            "value": {
                "gamma": 1.0,  # equal to True for Python, and yet no truth value
                "gate": [{"metric": "explained_variance", "at_least": 0.3}],
                "reference": None,
                "shuffle": True,
                "betas": (0.9, 0.999),
                "rewards": {},
                "extra": [],
            }
        },
    }
    assert flatten(recipe) == {
        "seed": "17",
        "stages.value.gamma": "1.0",
        "stages.value.gate.0.metric": "explained_variance",
        "stages.value.gate.0.at_least": "0.3",
        "stages.value.reference": "null",
        "stages.value.shuffle": "true",
        "stages.value.betas.0": "0.9",
        "stages.value.betas.1": "0.999",
        "stages.value.rewards": "{}",
        "stages.value.extra": "[]",
    }


def test_a_tag_that_is_too_long_keeps_whole_lines_or_of_a_single_one_what_fits() -> None:
    assert fit_tag("short") == "short"
    lines = "\n".join("x" * 99 for _ in range(100))
    assert fit_tag(lines) == "\n".join(["x" * 99] * 79) + "\n…"
    assert fit_tag("y" * 9000) == "y" * 7998 + "\n…"
