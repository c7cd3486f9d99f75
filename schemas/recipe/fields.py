"""Types of single fields: names, counts, shares and numbers with their bounds."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)

_SWITCH_WORDS = {"yes": True, "on": True, "no": False, "off": False}

_SWITCH_FORMS = {
    form: value for word, value in _SWITCH_WORDS.items() for form in (word, word.title(), word.upper())
}

SWITCHED_OFF = tuple(form for form, value in _SWITCH_FORMS.items() if not value)
"""Words of YAML 1.1 for false."""


def read_switch(value: Any) -> Any:
    """Return a word of YAML 1.1 for true or false as its value; anything else as it is."""
    return _SWITCH_FORMS.get(value, value) if isinstance(value, str) else value


MAX_NUMBER = 1e12
"""Largest absolute value of a number in a new recipe: databases and JSON readers take larger ones for integers that they
cannot hold."""
NEW = {"new": True}
"""Context for validating newly written values. Records of earlier versions are read without it."""


def _within_bounds(value: float, info: ValidationInfo) -> float:
    """Return the number. Raises ValueError if it is new and too large; recorded numbers stay readable."""
    if info.context == NEW and abs(value) > MAX_NUMBER:
        raise ValueError(f"{value:g} must be between -{MAX_NUMBER:g} and {MAX_NUMBER:g}")
    return value


# Strict: `true` is not 1.0 and "0.2" is not 0.2. An integer is a valid float.
_BOUNDED = AfterValidator(_within_bounds)
_LARGEST: dict[str, Any] = {"maximum": MAX_NUMBER}
Number = Annotated[
    float, Field(strict=True, json_schema_extra={"minimum": -MAX_NUMBER, **_LARGEST}), _BOUNDED
]
Probability = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]
NonNegative = Annotated[float, Field(ge=0.0, strict=True, json_schema_extra=_LARGEST), _BOUNDED]
Positive = Annotated[float, Field(gt=0.0, strict=True, json_schema_extra=_LARGEST), _BOUNDED]
AboveOne = Annotated[float, Field(gt=1.0, strict=True, json_schema_extra=_LARGEST), _BOUNDED]


Switch = Annotated[
    bool,
    Field(strict=True),
    BeforeValidator(read_switch),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": list(_SWITCH_FORMS)}]}),
]
"""``true`` or ``false``, or a word of YAML 1.1 for one of them, which our parser leaves as text."""
MAX_COUNT = 2**31 - 1
"""Largest count; torch and its kernels index with 32 or 64 bits."""

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
"""A name that a recipe gives to a dataset, verifier, reward or stage: lower case, digits, underscores."""
PoolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""Name of a work pool in Prefect."""
ServerUrl = Annotated[
    str, StringConstraints(pattern=r"^https?://[A-Za-z0-9._\-\[\]:]+(/[A-Za-z0-9._~/\-]*)?$", max_length=512)
]
"""Address of a server, without a login."""
QueriedUrl = Annotated[
    str,
    StringConstraints(
        pattern=r"^https?://[A-Za-z0-9._\-\[\]:]+(/[A-Za-z0-9._~/\-]*)?(\?[A-Za-z0-9._~%=&+,:/\-]*)?$",
        max_length=512,
    ),
]
"""Address of a server, without a login; it may have a query: ``?api-version=2026-01-01``."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
Integer = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0, strict=True)]
BelowHalf = Annotated[float, Field(ge=0.0, lt=0.5, strict=True)]
Similarity = Annotated[float, Field(ge=0.5, le=1.0, strict=True)]
Confidence = Annotated[float, Field(ge=0.5, lt=1.0, strict=True)]


def is_off(value: object) -> bool:
    """Return whether a later switch is off, to be left out of the JSON as by ``is_unset``."""
    return value is False


def is_default(default: object) -> Callable[[object], bool]:
    """Return a test for a later field with another default, to be left out of the JSON as by ``is_unset``."""
    return lambda value: value == default


def is_unset(value: object) -> bool:
    """Return whether a field has no value; for ``exclude_if``, so that a later field changes no earlier recipe's JSON."""
    return value is None or value == {}


MAX_NAMED = 200
"""Most datasets, verifiers, rewards or stages in one recipe; also the most items of any of its lists."""
