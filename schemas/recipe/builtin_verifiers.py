"""The built-in verifiers of a recipe, one class each: ``{source: "builtin:number", relative: 0.01}``.

A new one is its class here, its row in ``BUILTIN``, and a module in ``vantage.tasks.rewards.builtin`` that judges. A file
of the user's and ``builtin:exact_match`` are the class ``Verifier``.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from vantage.schemas.doubled import doubled
from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    CountOrZero,
    NonNegative,
    Positive,
    Probability,
    Switch,
    is_default,
)
from vantage.schemas.recipe.verifiers import EXACT_MATCH, Verifier

Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]
"""Name of a section, whose text is between ``<NAME>`` and ``</NAME>``."""
LanguageCode = Annotated[str, StringConstraints(pattern=r"^[a-z]{2,3}$")]
"""An ISO 639 code: ``en``, ``de``, ``zh``."""


class BuiltinVerifier(Verifier):
    """A verifier that is part of Vantage."""

    EXTRACTS: ClassVar[bool] = False
    """Whether ``extract`` chooses the part of the response that it reads."""
    COMPARES: ClassVar[bool] = False
    """Whether it reads the row's answer, which every prompt must have."""

    extract: str | None = None
    """A regular expression of RE2 with one group: the group's last match is judged, and a response without a match is wrong. None:
    the whole response is judged."""

    @property
    def returns_score(self) -> bool:
        """Whether its verdict is a number, and not right or wrong."""
        return False

    @rule
    def _fields_fit_the_source(self) -> None:
        if self.function != "verify":
            raise ValueError(f"{self.source} has no function={self.function}; remove it")
        if self.right is not None and not self.returns_score:
            raise ValueError(f"{self.source} returns right or wrong, and right is for scores; remove it")
        if self.extract is not None and not self.EXTRACTS:
            raise ValueError(
                f"{self.source} reads whole responses, and extract={self.extract!r} would do nothing; remove it"
            )


class NumberVerifier(BuiltinVerifier):
    """A response is right if it is the answer's number, within a tolerance."""

    EXTRACTS = COMPARES = True

    source: Literal["builtin:number"]
    """``builtin:number``."""
    absolute: NonNegative = 0.0
    """Largest difference from the answer. The larger one of ``absolute`` and ``relative`` counts; 0 and 0: the exact number."""
    relative: NonNegative = 0.0
    """Largest difference as a share of the answer's absolute value."""


class MathVerifier(BuiltinVerifier):
    """A response is right if math-verify finds it equal to the answer, as an expression."""

    EXTRACTS = COMPARES = True

    source: Literal["builtin:math_verify"]
    """``builtin:math_verify``."""


class RegexVerifier(BuiltinVerifier):
    """A response is right if it matches a regular expression of RE2."""

    source: Literal["builtin:regex"]
    """``builtin:regex``."""
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
    """The expression, in the syntax of RE2, which has no look-around and no back-references, and whose time is linear."""
    whole: Switch = True
    """Whether the whole response must match. False: any part of it."""


class JsonSchemaVerifier(BuiltinVerifier):
    """A response is right if it is JSON that is valid under a JSON schema."""

    EXTRACTS = True

    source: Literal["builtin:json_schema"]
    """``builtin:json_schema``."""
    matches: dict[str, Any]
    """The schema, in draft 2020-12; ``$ref`` stays inside it."""


class CodeVerifier(BuiltinVerifier):
    """A response is right if its Python program passes all tests of the row's answer, each run in an isolated process."""

    COMPARES = True

    source: Literal["builtin:code"]
    """``builtin:code``."""
    seconds: Annotated[int, Field(ge=1, le=600, strict=True)] = 5
    """Most seconds of CPU time of one test. All tests of a response together have ten times as many seconds on the
    clock, and 2 s for each test."""
    memory: Annotated[int, Field(ge=64, le=2**20, strict=True)] = 512
    """Most MiB of address space of the program."""
    disk: Annotated[int, Field(ge=1, le=2**16, strict=True)] = 16
    """Most MiB of files in the program's own folder, which is held in memory."""
    output: Annotated[int, Field(ge=1, le=2**30, strict=True)] = 2**20
    """Most bytes that one test may print, or return as JSON."""
    isolation: Literal["required", "optional"] = Field("required", exclude_if=is_default("required"))
    """``required``: programs have no network, no other files and no other processes; the run is refused where the kernel does not
    allow that. ``optional``: where it does not, they run with the limits on time, memory and output alone, as the user who runs
    the stage. The provenance of the stage records which."""


class LanguageVerifier(BuiltinVerifier):
    """A response is right if py3langid finds that it is in the given language."""

    EXTRACTS = True

    source: Literal["builtin:language"]
    """``builtin:language``."""
    language: LanguageCode
    """The ISO 639 code of the language: ``en``, ``de``, ``zh``."""
    at_least: Probability = 0.5
    """Least probability of the language, among all that py3langid knows."""


class LengthVerifier(BuiltinVerifier):
    """A response is right if its length is within bounds."""

    EXTRACTS = True

    source: Literal["builtin:length"]
    """``builtin:length``."""
    at_least: CountOrZero = 0
    """Least length."""
    at_most: CountOrZero | None = None
    """Greatest length; None: any."""
    unit: Literal["characters", "words"] = "characters"
    """The unit that is counted: Unicode characters, or words between white space."""

    @rule
    def _bounds_bound(self) -> None:
        if self.at_most is None and self.at_least == 0:
            raise ValueError("at_least=0 and at_most=None accept every length; give one of them")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(
                f"at_most={self.at_most} is below at_least={self.at_least}; no length is right; correct one"
            )


class RepetitionVerifier(BuiltinVerifier):
    """A response is right if few of its n-grams of words or characters are repeated."""

    EXTRACTS = True

    source: Literal["builtin:repetition"]
    """``builtin:repetition``."""
    at_most: Probability
    """Largest share of repeated n-grams: 1 − (number of distinct ones) / (number of all)."""
    ngram: Annotated[int, Field(ge=1, le=100, strict=True)] = 4
    """Number of words or characters in an n-gram."""
    unit: Literal["characters", "words"] = "words"
    """The unit of an n-gram; characters for languages that write no spaces."""


class FormatVerifier(BuiltinVerifier):
    """A response is right if it consists of sections between tags, in this order and each once."""

    source: Literal["builtin:format"]
    """``builtin:format``."""
    tags: Annotated[tuple[Tag, ...], Field(min_length=1, max_length=MAX_NAMED)]
    """Names of the sections: ``[think, answer]`` for ``<think>…</think><answer>…</answer>``."""

    @rule
    def _tags_differ(self) -> None:
        twice = doubled(self.tags)
        if twice:
            raise ValueError(f"tags has {twice[0]} twice; a response has each section once; leave one out")


class ReasoningGymVerifier(BuiltinVerifier):
    """A response is right if Reasoning Gym's own scoring gives it at least a given score; or that score is the verdict."""

    EXTRACTS = COMPARES = True

    source: Literal["builtin:reasoning_gym"]
    """``builtin:reasoning_gym``."""
    at_least: Positive = 1.0
    """Least score of a right response, and of an entry's own answer; many tasks give a score between 0 and 1 for
    nearly right responses."""
    graded: Switch = Field(False, exclude_if=is_default(False))
    """Whether the verdict is the score itself, from 0 to 1. False: right or wrong."""

    @property
    def returns_score(self) -> bool:
        """Whether its verdict is a number, and not right or wrong."""
        return self.graded


@dataclass(frozen=True, kw_only=True)
class BuiltinRow:
    """One row: a built-in verifier."""

    verifier: type[BuiltinVerifier]
    """Its class."""
    module: str
    """Dotted name of its module, whose function ``load`` makes the verifier."""
    libraries: tuple[str, ...] = ()
    """The distributions that decide what is right. Their versions are in the verifier's key. Empty: our own code and Python's."""
    revision: int = 1
    """Raised whenever our own code judges a response differently; in the verifier's key from the second revision on."""

    @property
    def source(self) -> str:
        """Its ``source`` in a recipe."""
        [source] = self.verifier.model_fields["source"].annotation.__args__  # type: ignore[union-attr]
        return str(source)


PYTHON = "python"
"""Stands for the interpreter among libraries; its version counts as 3.11, without the third number."""
RULES = "rules of vantage"
"""Stands for our own code among libraries; its version is the row's revision."""
_JUDGES = "vantage.tasks.rewards.builtin."

BUILTIN = (
    BuiltinRow(verifier=NumberVerifier, module=f"{_JUDGES}number", revision=2),
    BuiltinRow(
        verifier=MathVerifier,
        module=f"{_JUDGES}mathematics",
        libraries=("math-verify", "latex2sympy2_extended", "sympy"),
        revision=2,
    ),
    BuiltinRow(verifier=RegexVerifier, module=f"{_JUDGES}regex", libraries=("google-re2",)),
    BuiltinRow(verifier=JsonSchemaVerifier, module=f"{_JUDGES}json_document", libraries=("jsonschema",)),
    BuiltinRow(verifier=CodeVerifier, module=f"{_JUDGES}code", libraries=(PYTHON,), revision=2),
    BuiltinRow(verifier=LanguageVerifier, module=f"{_JUDGES}language", libraries=("py3langid",)),
    BuiltinRow(verifier=LengthVerifier, module=f"{_JUDGES}measures"),
    BuiltinRow(verifier=RepetitionVerifier, module=f"{_JUDGES}measures"),
    BuiltinRow(verifier=FormatVerifier, module=f"{_JUDGES}sections"),
    BuiltinRow(verifier=ReasoningGymVerifier, module=f"{_JUDGES}reasoning", libraries=("reasoning-gym",)),
)
"""Every built-in verifier but ``builtin:exact_match``."""
ROW_OF = {row.source: row for row in BUILTIN}
"""Source → row."""
SOURCES = (EXACT_MATCH, *ROW_OF)
"""Every ``source`` that names a built-in verifier."""
COMPARING = frozenset({EXACT_MATCH, *(source for source, row in ROW_OF.items() if row.verifier.COMPARES)})
"""Sources of verifiers that read the row's answer."""


def _read(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Verifier:
    if not isinstance(value, dict):
        return handler(value)  # type: ignore[no-any-return]
    row = ROW_OF.get(str(value.get("source")))
    return (Verifier if row is None else row.verifier).model_validate(value, context=info.context)


if TYPE_CHECKING:
    AnyVerifier = Verifier
else:
    AnyVerifier = Annotated[reduce(or_, (Verifier, *(row.verifier for row in BUILTIN))), WrapValidator(_read)]
