"""The port of built-in verifiers, and what is the same for all of them."""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from vantage.schemas.recipe.builtin_verifiers import ROW_OF, BuiltinVerifier
from vantage.tasks.rewards.builtin.expressions import compiled, last_group
from vantage.tasks.rewards.verifier_file import BrokenVerifier, VerifierFunction, shown_case

MAX_CHARACTERS = 2**20
"""Longest response in Unicode characters; a longer one is wrong, whatever its content."""


class UnusableAnswer(ValueError):
    """A row's answer is not what the verifier compares with."""


Judge = Callable[[str, str | None], bool | float]
"""(the response or the part that ``extract`` has found, the row's answer) → right or wrong, or a score.

It raises UnusableAnswer for an answer that it cannot read, whatever the response.
"""


class Loader(Protocol):
    """The function ``load`` of a built-in verifier's module."""

    def __call__(self, verifier: BuiltinVerifier) -> Judge:
        """Return the judge with the recipe's settings. Raises ValueError if a setting cannot be used."""


def load_builtin(verifier: BuiltinVerifier, *, name: str) -> VerifierFunction:
    """Return a built-in verifier as a function.

    Args:
        name: the verifier's name in the recipe.

    Raises:
        BrokenVerifier: a setting cannot be used; from the function itself: the row's answer cannot be used.
    """
    load: Loader = import_module(ROW_OF[verifier.source].module).load
    try:
        judge = load(verifier)
        extract = None if verifier.extract is None else compiled(verifier.extract, field="extract")
    except ValueError as error:
        raise BrokenVerifier(f"verifiers.{name}.{error}") from error

    wrong = 0.0 if verifier.returns_score else False

    def verify(prompt: str, response: str, answer: str | None) -> bool | float:
        found = response if len(response) <= MAX_CHARACTERS else None
        if found is not None and extract is not None:
            found = last_group(extract, found)
        try:
            verdict = judge(
                found or "", answer
            )  # called even if `extract` finds nothing: an unusable answer is reported for every response
        except UnusableAnswer as error:
            raise BrokenVerifier(f"verifiers.{name}: prompt {prompt[:100]!r}: {error}") from error
        except (MemoryError, RecursionError):  # needs more memory or depth than a right response
            return wrong
        except Exception as error:
            raise BrokenVerifier(
                f"verifiers.{name}: {verifier.source} raised {type(error).__name__}: {error} for "
                f"{shown_case(prompt, response, answer)}; report it, or judge these responses by a verifier of your own"
            ) from error
        return wrong if found is None else verdict

    return verify
