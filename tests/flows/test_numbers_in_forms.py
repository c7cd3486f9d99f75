"""Prefect's forms take no number beyond 64 bits, which would break its pages and its API for everyone."""

from collections.abc import Iterator
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import is_valid_schema, validate

from vantage.flows.pipeline import pipeline
from vantage.flows.pools.attempt_flow import attempt

REQUIRED = {pipeline: {"recipe": "quickstart"}, attempt: {"request": "{}", "number": 1, "name": "a"}}


def kinds(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every part of a schema that has a type."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield path, schema
        for name, part in schema.items():
            yield from kinds(part, f"{path}.{name}")
    elif isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from kinds(part, f"{path}[{number}]")


@pytest.mark.parametrize("flow", [pipeline, attempt], ids=lambda flow: str(flow.name))
def test_every_number_of_a_form_has_bounds_that_a_database_holds(flow: Any) -> None:
    schema = parameter_schema(flow).model_dump()
    is_valid_schema(schema)
    seen = dict(kinds(schema["properties"]))
    assert seen
    for path, part in seen.items():
        assert part["type"] in ("string", "integer", "boolean", "array", "null"), (
            path
        )  # no object, which may hold any number
        if part["type"] == "integer":
            assert part["minimum"] >= -(2**63), path
            assert part.get("maximum", part.get("exclusiveMaximum")) < 2**63, path


@pytest.mark.parametrize(
    ("flow", "name"), [(pipeline, "seed"), (pipeline, "restarts"), (attempt, "number"), (attempt, "request")]
)
@pytest.mark.parametrize("value", [10**30, 1e30, -(10**30), {"learning_rate": 1e30}])
def test_what_a_database_cannot_hold_is_refused_by_the_form(flow: Any, name: str, value: object) -> None:
    """Prefect's server compares what is filled in with this schema."""
    schema = parameter_schema(flow).model_dump()
    assert not validate(REQUIRED[flow], schema), "what a form needs is accepted"
    assert validate({**REQUIRED[flow], name: value}, schema)
