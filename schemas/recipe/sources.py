"""Parsed sources: the text of a ``source`` field as a value.

``builtin:NAME`` and ``builtin:NAME/KIND``, ``hub:ORGANISATION/NAME@REVISION``, ``package:NAME``, ``gguf:FILE``, or a
path. Only a model can come from the hub, a package or a GGUF file; data and verifiers are built in or paths.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Builtin:
    """A part of Vantage: a model, data of one kind (``builtin:arithmetic/prompts``), or a verifier."""

    name: str
    kind: str | None = None

    def __str__(self) -> str:
        return f"builtin:{self.name}" + ("" if self.kind is None else f"/{self.kind}")


@dataclass(frozen=True)
class Hub:
    """A model on the Hugging Face hub at a commit, branch or tag."""

    repository: str
    revision: str

    PATTERN = r"hub:[A-Za-z0-9._-]+/[A-Za-z0-9._-]+@[A-Za-z0-9._/-]+"

    @property
    def is_well_formed(self) -> bool:
        """Whether it is a valid name on the hub."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    def __str__(self) -> str:
        return f"hub:{self.repository}@{self.revision}"


@dataclass(frozen=True)
class Package:
    """The one GGUF file of an installed Python distribution."""

    name: str

    PATTERN = r"package:[A-Za-z0-9][A-Za-z0-9._-]*"

    @property
    def is_well_formed(self) -> bool:
        """Whether it is a valid name of a distribution."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    def __str__(self) -> str:
        return f"package:{self.name}"


@dataclass(frozen=True)
class Gguf:
    """A GGUF file."""

    path: Path

    def __str__(self) -> str:
        return f"gguf:{self.path}"


@dataclass(frozen=True)
class LocalPath:
    """A path: a model's folder, or a file of data or Python."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


FileSource = Builtin | LocalPath
"""Source of data or of a verifier."""
ModelSource = Builtin | Hub | Package | Gguf | LocalPath


def file_source(text: str) -> FileSource:
    """Parse the ``source`` of data or of a verifier; nothing is looked up."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme != "builtin":
        return LocalPath(Path(text))
    name, slash, kind = rest.partition("/")
    return Builtin(name, kind if slash else None)


def model_source(text: str) -> ModelSource:
    """Parse ``model.source``; nothing is looked up."""
    scheme, colon, rest = text.partition(":")
    match scheme if colon else None:
        case "builtin":
            return Builtin(rest)
        case "hub":
            repository, _, revision = rest.partition("@")
            return Hub(repository, revision)
        case "package":
            return Package(rest)
        case "gguf":
            return Gguf(Path(rest))
        case _:
            return LocalPath(Path(text))
