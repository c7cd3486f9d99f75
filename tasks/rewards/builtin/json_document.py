"""``builtin:json_schema``: is the response JSON, and as a JSON schema describes it? The library jsonschema decides.

The response is one JSON text with white space around it, as RFC 8259 has it: ``NaN``, ``Infinity``, a name twice in one object,
text after the end and a code fence around it are wrong. Formats (``format: date``) are not checked.
"""

import json
from collections.abc import Iterator
from typing import Any

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, JsonSchemaVerifier
from vantage.schemas.strict_json import without_repeats
from vantage.tasks.rewards.builtin.json_values import comparable
from vantage.tasks.rewards.builtin.judge import Judge


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the validation. Raises ValueError if the schema is invalid, or refers to something outside."""
    from jsonschema import Draft202012Validator, SchemaError, validators
    from referencing import Registry

    assert isinstance(verifier, JsonSchemaVerifier)
    try:
        Draft202012Validator.check_schema(verifier.matches)
    except SchemaError as error:
        raise ValueError(
            f"matches is no JSON schema ({error.message} at {error.json_path}); correct it"
        ) from None
    outside = next((each for each in _references(verifier.matches) if not each.startswith("#")), None)
    if outside is not None:
        raise ValueError(
            f"matches refers to {outside!r}, which is outside of the schema; write it under $defs, and refer to #/$defs/NAME"
        )
    with_linear_time = validators.extend(Draft202012Validator, {"uniqueItems": _unique_items})
    validator = with_linear_time(verifier.matches, registry=Registry())

    def judge(response: str, _: str | None) -> bool:
        try:
            document = json.loads(response, parse_constant=_refused, object_pairs_hook=without_repeats)
        except ValueError:
            return False
        return bool(validator.is_valid(document))

    return judge


def _unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[Exception]:
    """Yield an error if two items of a list are equal. The library compares each item with each, which takes 45 s for 8,000 objects."""
    from jsonschema import ValidationError

    if wanted and validator.is_type(instance, "array"):
        forms = {comparable(each) for each in instance}
        if len(forms) < len(instance):
            yield ValidationError("two items are equal")


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [
            value
            for key, value in schema.items()
            if key in ("$ref", "$dynamicRef") and isinstance(value, str)
        ]
        return own + [found for value in schema.values() for found in _references(value)]
    if isinstance(schema, list):
        return [found for value in schema for found in _references(value)]
    return []


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
