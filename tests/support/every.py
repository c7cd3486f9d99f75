"""Check many items of one kind in one test, where a test for each would only check that a name or a text exists."""

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

Check = Callable[..., None]


def every(names: str | Sequence[str], items: Iterable[Any]) -> Callable[[Check], Check]:
    """Give the test every item in turn, as ``pytest.mark.parametrize`` does for a test each.

    All items are checked, and one message lists those that fail. Each gets its own copy of a fixture that is a dict,
    its own folder below ``tmp_path``, and a ``monkeypatch`` that is undone after it; other fixtures are shared.

    Args:
        names: the parameters that take the values of an item: a sequence, or one text with commas between them.
        items: a value each, a tuple of values for several names, or a ``pytest.param``, whose id is then its name.
    """
    parameters = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    cases = [_case(parameters, item) for item in items]

    def decorate(check: Check) -> Check:
        signature = inspect.signature(check)

        @functools.wraps(check)
        def over_all(**fixtures: Any) -> None:
            failures = []
            for number, (label, values) in enumerate(cases):
                try:
                    _check(check, values, fixtures, number)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"- {label}\n{_described(error)}")
            if failures:
                pytest.fail(f"{len(failures)} of {len(cases)} fail:\n" + "\n".join(failures), pytrace=False)

        kept = [each for name, each in signature.parameters.items() if name not in parameters]
        over_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return over_all

    assert cases, f"no items for {names}"
    return decorate


def _case(parameters: list[str], item: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of an item, and parameter → value."""
    is_param = isinstance(item, type(pytest.param(None)))
    values = item.values if is_param else (item,) if len(parameters) == 1 else tuple(item)
    assert len(values) == len(parameters), f"{values!r} are not values for {', '.join(parameters)}"
    shown = item.id if is_param and item.id is not None else ", ".join(f"{value!r:.100}" for value in values)
    return str(shown), dict(zip(parameters, values, strict=True))


def _check(check: Check, values: dict[str, Any], fixtures: dict[str, Any], number: int) -> None:
    """Check one item with its own copies of what it may change."""
    with pytest.MonkeyPatch.context() as patch:
        own: dict[str, Any] = {}
        for name, value in fixtures.items():
            if isinstance(value, pytest.MonkeyPatch):
                value = patch
            elif isinstance(value, dict):
                value = copy.deepcopy(value)
            elif name == "tmp_path":
                value = Path(value) / str(number)
                value.mkdir(exist_ok=True)
            own[name] = value
        check(**own, **values)


def _described(error: BaseException) -> str:
    """Return the error with the line of the test that raised it."""
    lines = traceback.format_exception(error)
    return "".join(lines[-2:]).rstrip()
