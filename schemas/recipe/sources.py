"""What a ``source`` names: its text read once, into a value.

``builtin:NAME`` and ``builtin:NAME/KIND``, ``hub:ORGANISATION/NAME@REVISION``, ``package:NAME``, ``gguf:FILE``, or a path.
Only a model comes from the hub, a package or a GGUF file; of data and verifiers, whatever is not built in is a path.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Builtin:
    """What comes with Vantage: a model, data of one kind (``builtin:arithmetic/prompts``), a verifier."""

    name: str
    kind: str | None = None

    def __str__(self) -> str:
        return f"builtin:{self.name}" + ("" if self.kind is None else f"/{self.kind}")


@dataclass(frozen=True)
class Hub:
    """A model of the Hugging Face hub at a commit, branch or tag."""

    repository: str
    revision: str

    PATTERN = r"hub:[A-Za-z0-9._-]+/[A-Za-z0-9._-]+@[A-Za-z0-9._/-]+"

    @property
    def is_written_right(self) -> bool:
        """Whether the hub could have it."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    def __str__(self) -> str:
        return f"hub:{self.repository}@{self.revision}"


@dataclass(frozen=True)
class Package:
    """The one GGUF file of an installed Python distribution."""

    name: str

    PATTERN = r"package:[A-Za-z0-9][A-Za-z0-9._-]*"

    @property
    def is_written_right(self) -> bool:
        """Whether a distribution can be called so."""
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
class Place:
    """A path: of a model's folder, or of a file of data or Python."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


FileSource = Builtin | Place
"""Of data and verifiers."""
ModelSource = Builtin | Hub | Package | Gguf | Place


def file_source(text: str) -> FileSource:
    """What the ``source`` of data or of a verifier names; nothing is looked up."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme != "builtin":
        return Place(Path(text))
    name, slash, kind = rest.partition("/")
    return Builtin(name, kind if slash else None)


def model_source(text: str) -> ModelSource:
    """What ``model.source`` names; nothing is looked up."""
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
            return Place(Path(text))
