"""Verdicts, which verifiers return for responses: their checks, and their form as lines between processes."""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from vantage.schemas.recipe.fields import MAX_NAMED
from vantage.schemas.records.verdict_form import RIGHT_OR_WRONG, VerdictForm

Verdict = bool | float | dict[str, float]
"""Right or wrong, one score, or scores by name."""

MAX_SCORE = 1e30
"""Largest size of a score: scores are added and squared in float32."""

_RIGHT, _WRONG = b"1\n", b"0\n"
STRANGE = "write to standard output alone: other open files belong to Vantage"
"""Remedy for a line that other code than ours has written."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


class UnusableVerdict(ValueError):
    """A returned value is no verdict, or a verdict in another form than its verifier's; the text has rule and
    remedy."""


def as_verdict(returned: object) -> Verdict:
    """Return the result of a user's function as a verdict: a bool (1 and 0 too), a float, or floats by name, sorted.

    Raises:
        UnusableVerdict: the result is something else, or a number that is not finite.
    """
    if isinstance(returned, bool) or is_numpy(returned, "bool_"):
        return bool(returned)
    if isinstance(returned, int) and returned in (0, 1):
        return bool(returned)
    if isinstance(returned, Mapping):
        return _by_name(returned)
    if isinstance(returned, Real):
        return _finite(returned, "the score")
    raise UnusableVerdict("return True or False, a number, or numbers by name ({'style': 0.5})")


def is_numpy(value: object, name: str) -> bool:
    """Return whether a value is an instance of numpy's class of that name.

    Does not import numpy, which would take a third of the start of a verifier's process. If nobody has imported numpy,
    no value is of its classes.
    """
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, name))


def _by_name(returned: Mapping[object, object]) -> dict[str, float]:
    if not 0 < len(returned) <= MAX_NAMED:
        raise UnusableVerdict(f"return between 1 and {MAX_NAMED} named scores")
    found = {}
    for name, score in returned.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UnusableVerdict(
                f"{name!r:.80} is no name of a score; use lower case, digits and underscores"
            )
        if not isinstance(score, Real) and not is_numpy(score, "bool_"):
            raise UnusableVerdict(f"{name} is a {type(score).__name__}; return a number for each name")
        found[name] = _finite(score, name)
    return dict(sorted(found.items()))


def _finite(score: Any, what: str) -> float:
    try:
        found = float(score)
    except OverflowError:  # the integer is too large for a float
        found = math.inf
    if not math.isfinite(found):
        raise UnusableVerdict(f"{what} is not finite; return a finite number, for a failed measurement too")
    if abs(found) > MAX_SCORE:
        raise UnusableVerdict(f"the size of {what} is above {MAX_SCORE:g}; scale it down")
    return found


def form_of(verdict: Verdict) -> VerdictForm:
    """Return the form of one verdict."""
    if isinstance(verdict, bool):
        return RIGHT_OR_WRONG
    if isinstance(verdict, dict):
        return VerdictForm(kind="named_scores", names=tuple(verdict))
    return VerdictForm(kind="score")


def common_form(verdicts: Sequence[Verdict]) -> VerdictForm:
    """Return the form of the first verdict that is more than right or wrong; right or wrong if there is none."""
    forms = map(form_of, verdicts)
    return next((form for form in forms if form != RIGHT_OR_WRONG), RIGHT_OR_WRONG)


def fitted(verdict: Verdict, form: VerdictForm) -> Verdict:
    """Return a verdict in its verifier's form: True and False are the scores 1 and 0 of a verifier that returns one number.

    Raises:
        UnusableVerdict: the verdict has another form.
    """
    if form.kind == "score" and isinstance(verdict, bool):
        return float(verdict)
    found = form_of(verdict)
    if found == form:
        return verdict
    if found.kind == form.kind:
        missing, new = set(form.names) - set(found.names), set(found.names) - set(form.names)
        changes = [f"lacks {', '.join(sorted(missing))}"] if missing else []
        changes += [f"has {', '.join(sorted(new))} besides"] if new else []
        raise UnusableVerdict(
            f"the dry run had {form}, and this one {' and '.join(changes)}; return the same names for every row"
        )
    remedy = "return the same form for every row"
    if form == RIGHT_OR_WRONG and found.kind == "score":
        remedy = "return True or False for every row, or else floats: 1.0 is a score, and the integers 1 and 0 are right and wrong"
    raise UnusableVerdict(f"the dry run had {form}, and this is {found}; {remedy}")


def is_close(one: Verdict, other: Verdict) -> bool:
    """Return whether two verdicts on one response differ at most by rounding, as a model's verdicts do between batch
    sizes."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[name], other[name]) for name in one)
    if isinstance(one, dict) or isinstance(other, dict):
        return False
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)


def line_of(verdict: Verdict) -> bytes:
    """Return a verdict as a line; a float has all its digits."""
    if isinstance(verdict, bool):
        return _RIGHT if verdict else _WRONG
    return json.dumps(verdict if isinstance(verdict, dict) else [verdict]).encode() + b"\n"


def numbered(line: bytes, number: int) -> bytes:
    """Return a line with its number, so that a repeated line, or a line from other code, cannot shift verdicts."""
    return b"%d %b" % (number, line)


def without_number(line: bytes, number: int) -> bytes:
    """Return a line without its number.

    Raises:
        UnusableVerdict: the line has another number.
    """
    start = b"%d " % number
    if not line.startswith(start):
        raise UnusableVerdict(STRANGE)
    return line[len(start) :]


def verdict_in(line: bytes) -> Verdict | None:
    """Return the verdict in a line; None: it is a message.

    Raises:
        UnusableVerdict: the line is neither, since other code than ours has written it.
    """
    if line in (_RIGHT, _WRONG):
        return line == _RIGHT
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise UnusableVerdict(STRANGE) from None
    if isinstance(found, str):
        return None
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], float):
        return _finite(found[0], "the score")
    if isinstance(found, dict):
        return _by_name(found)
    raise UnusableVerdict(STRANGE)
