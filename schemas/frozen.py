"""The base class of all data types: immutable, unknown fields are refused."""

from collections.abc import Callable
from typing import (
    Any,
    ClassVar,
    Self,
    TypeVar,
)

from pydantic import BaseModel, ConfigDict, model_validator

Rule = TypeVar("Rule", bound=Callable[[Any], None])


class BrokenRules(ValueError):
    """All rules over several fields that a value breaks, one message each."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = messages
        super().__init__("\n".join(messages))


def rule(check: Rule) -> Rule:
    """Mark a method as a rule over several fields: it raises ValueError if they contradict each other.

    pydantic stops at the first validator that fails; of these rules, all are checked and reported together.
    """
    check.is_rule = True  # type: ignore[attr-defined]
    return check


class Frozen(BaseModel):
    """An immutable value that refuses unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
    )

    _rules: ClassVar[tuple[str, ...]] = ()
    """Names of the methods that are rules, the base's before its own."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        own = [name for name, member in vars(cls).items() if getattr(member, "is_rule", False)]
        cls._rules = tuple(dict.fromkeys((*cls._rules, *own)))

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = []
        for name in self._rules:
            try:
                getattr(self, name)()
            except ValueError as error:
                broken.append(str(error))
        if broken:
            raise BrokenRules(broken)
        return self
