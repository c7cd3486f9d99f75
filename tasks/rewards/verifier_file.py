"""Load a user's verifier from its file as a function; its faults are described in terms of the file.

The file is run under a private name and from its place in the store, so that its name and the files beside it have no
effect. Stages run it in a separate process (``vantage.tasks.rewards.verifier_process``).
"""

import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vantage.tasks.rewards.verdicts import UnusableVerdict, Verdict, as_verdict

VerifierFunction = Callable[[str, str, str | None], Verdict]
"""(prompt, response, the row's answer or None) → verdict. A user's function is called with these argument names."""

FILE = "verifier.py"
"""Name of the copy in the store."""
VERIFY, VERIFY_BATCH = "verify", "verify_batch"
SIGNATURE = "(prompt, response, answer)"
_SHOWN_CHARACTERS = 200


class BrokenVerifier(ValueError):
    """A verifier cannot be loaded or called, or returns no verdict."""


@dataclass(frozen=True)
class UserFunction:
    """A function of a user's file, and the names with which its faults are described."""

    call: Callable[..., Any]
    function: str
    """Name of the function in the file."""
    verifier: str
    """Name of the verifier in the recipe."""
    file: Path
    takes_batch: bool
    """Whether the function is called with prompts, responses and answers, and not for one response at a time."""
    is_async: bool

    def judge(self, prompt: str, response: str, answer: str | None) -> Verdict:
        """Return the verdict on one response; BrokenVerifier if it raises, or returns no verdict."""
        about = f"for {shown_case(prompt, response, answer)}"
        try:
            returned = self.call(prompt=prompt, response=response, answer=answer)
        except BaseException as error:  # a user's code may raise anything
            raise self.raised(error, about) from error
        return self.checked(returned, about)

    def checked(self, returned: object, about: str) -> Verdict:
        """Return the function's result as a verdict; BrokenVerifier if it is none."""
        try:
            return as_verdict(returned)
        except UnusableVerdict as error:
            raise self.broken(
                f"returned {_short(returned)} (a {type(returned).__name__}) {about}; {error}"
            ) from None
        except BaseException as error:  # a user's class may raise anything when it is read
            raise self.broken(
                f"returned a {type(returned).__name__} that cannot be read: {_described(error, self.file)} {about}; return True or "
                "False, a number, or numbers by name ({'style': 0.5})"
            ) from error

    def raised(self, error: BaseException, about: str) -> BrokenVerifier:
        """Return the fault of a call that raised."""
        return self.broken(f"raised {_described(error, self.file)} {about}")

    def broken(self, fault: str) -> BrokenVerifier:
        """Return a fault with the names of verifier and function."""
        return BrokenVerifier(f"verifiers.{self.verifier}: {self.function} {fault}")


def load_user_function(file: Path, function: str, *, name: str) -> UserFunction:
    """Return the function of the file; ``verify_batch`` in place of ``verify`` if the file has only that.

    Args:
        name: the verifier's name in the recipe.

    Raises:
        BrokenVerifier: the file is not Python or fails as it is run, or has no such function with the parameters
            prompt, response and answer, or prompts, responses and answers.
    """
    module = _run(file, name=name)
    if function == VERIFY and not hasattr(module, VERIFY) and callable(getattr(module, VERIFY_BATCH, None)):
        function = VERIFY_BATCH
    found, takes_batch = _function_in(module, function, name=name)
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004  (an object whose call is a coroutine)
    )
    return UserFunction(found, function, name, file, takes_batch=takes_batch, is_async=is_async)


def _run(file: Path, *, name: str) -> ModuleType:
    """Return the module made from the file; no bytecode is left in the store."""
    module = ModuleType(f"_verifier_{name}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look up their own module here
    try:
        code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f"line {error.lineno}: {error.msg}" if error.lineno else error.msg
        raise BrokenVerifier(f"verifiers.{name}.source: the file is not Python ({line})") from error
    except ValueError as error:
        raise BrokenVerifier(f"verifiers.{name}.source: the file is not Python ({error})") from error
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        alone = "; a verifier is one file, which may import installed packages alone"
        raise BrokenVerifier(
            f"verifiers.{name}.source: running the file raised {_described(error, file)}"
            f"{alone if isinstance(error, ImportError) else ''}"
        ) from error
    return module


def _function_in(module: ModuleType, function: str, *, name: str) -> tuple[Callable[..., Any], bool]:
    """Return the function, and whether it takes a batch."""
    found = getattr(module, function, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise BrokenVerifier(
            f"verifiers.{name}.function={function!r}: the file has no such function (it has "
            f"{', '.join(there) or 'none'}); define def {function}{SIGNATURE}, or name another as function"
        )
    fault = _fault_of_call(found, prompt="", response="", answer=None)
    if fault is None:
        return found, False
    if _fault_of_call(found, prompts=[], responses=[], answers=[]) is None:
        return found, True
    raise BrokenVerifier(
        f"verifiers.{name}.function={function!r} cannot be called with prompt, response and answer by these names: "
        f"{fault}; define def {function}{SIGNATURE}"
    )


def _fault_of_call(function: Callable[..., Any], **arguments: object) -> str | None:
    """Return why the function cannot be called with these arguments; None: it can."""
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _described(error: BaseException, file: Path) -> str:
    """Return the error in a line, with the place in the user's file that it came from."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f" (line {lines[-1].lineno}: {lines[-1].line})" if lines else ""
    try:
        text = str(error)
    except BaseException:  # a user's class may do anything
        text = "(without a text)"
    text = text.encode("utf-8", "backslashreplace").decode()  # messages are written as UTF-8
    return f"{type(error).__name__}: {_cut(' '.join(text.split()))}{place}"


def shown_case(prompt: str, response: str, answer: str | None) -> str:
    """Return a verifier's arguments, shortened."""
    case = f"prompt {_short(prompt)}, response {_short(response)}, answer {_short(answer)}"
    return case if answer is not None else f"{case} (data.*.columns.answer maps answers)"


def _short(value: object) -> str:
    if isinstance(value, str | bytes):
        value = value[: _SHOWN_CHARACTERS + 1]  # only the shown part has to be written out
    try:
        return _cut(repr(value))
    except BaseException:  # a user's class may do anything
        return f"(a {type(value).__name__})"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
