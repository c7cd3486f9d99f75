"""Parse sources: the text of a ``source`` field becomes a value.

``builtin:NAME`` and ``builtin:NAME/KIND``, ``hub:ORGANISATION/NAME@REVISION``, ``package:NAME``, ``gguf:FILE``,
``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``, ``run:RUN/STAGE``, or a path. Only a model can come from a package, a GGUF
file, MLflow or a run; data may be of the hub, ``hub:ORGANISATION/NAME@COMMIT`` or files of it, ``hub:ORGANISATION/NAME@COMMIT/FILE``; verifiers are
built in or paths.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self


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
        """Return whether it is a valid name on the hub."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    def __str__(self) -> str:
        return f"hub:{self.repository}@{self.revision}"


@dataclass(frozen=True)
class HubFiles:
    """Files of a dataset's repository on the Hugging Face hub at a commit."""

    repository: str
    revision: str
    files: str
    """A file's path in the repository; ``*`` and ``?`` in its last part match several."""

    PATTERN = r"hub:[A-Za-z0-9._-]+/[A-Za-z0-9._-]+@[0-9a-f]{40}(/(?!\.\.(/|$))[^/\\:]+)+"

    @property
    def is_well_formed(self) -> bool:
        """Return whether it is a valid name on the hub, with a commit and a path that stays in the repository."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    @property
    def has_wildcards(self) -> bool:
        """Return whether it may match several files."""
        return bool(set("*?") & set(self.files.rpartition("/")[2]))

    def __str__(self) -> str:
        return f"hub:{self.repository}@{self.revision}" + (f"/{self.files}" if self.files else "")


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hugging Face hub at a commit; the recipe names one of its configurations and splits."""

    repository: str
    revision: str

    PATTERN = r"hub:[A-Za-z0-9._-]+/[A-Za-z0-9._-]+@[0-9a-f]{40}"

    @property
    def is_well_formed(self) -> bool:
        """Return whether it is a valid name on the hub, with a commit."""
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
        """Return whether it is a valid name of a distribution."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    def __str__(self) -> str:
        return f"package:{self.name}"


@dataclass(frozen=True)
class Gguf:
    """A GGUF file."""

    path: Path

    def __str__(self) -> str:
        return f"gguf:{self.path}"


_ABSENT = "none"


@dataclass(frozen=True)
class Registered:
    """A policy that a run has published: a registered model of MLflow, by alias or by version.

    A run pins it when it begins: ``models:/NAME/VERSION#DIGEST``, or ``models:/NAME@ALIAS#none`` where there is none yet.
    """

    name: str
    alias: str | None = None
    version: str | None = None
    pin: str | None = None
    """Content digest of the published artifact, or ``none``; None: MLflow has not been asked."""

    PATTERN = (
        r"models:/[A-Za-z0-9][A-Za-z0-9._-]{0,127}(@[A-Za-z][A-Za-z0-9_-]{0,62}|/[1-9][0-9]*(#[0-9a-f]{64})?)"
    )

    @property
    def is_well_formed(self) -> bool:
        """Return whether it names a version of a registered model, by number or alias."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    @property
    def digest(self) -> str | None:
        """Content digest of the version, if it is pinned and exists."""
        return None if self.is_absent else self.pin

    @property
    def is_absent(self) -> bool:
        """Return whether MLflow had no such version when the run began."""
        return self.pin == _ABSENT

    def as_absent(self) -> Self:
        """Pin of a model without a version."""
        return replace(self, pin=_ABSENT)

    def __str__(self) -> str:
        place = "" if self.alias is None else f"@{self.alias}"
        place += "" if self.version is None else f"/{self.version}"
        return f"models:/{self.name}{place}" + ("" if self.pin is None else f"#{self.pin}")


@dataclass(frozen=True)
class StageOfRun:
    """A policy that a step of another run has made: ``latest``, or a run's id, the beginning of its id, or its number.

    A run pins it when it begins: ``run:RUN_ID/STEP#DIGEST``.
    """

    run: str
    step: str
    digest: str | None = None
    """Content digest of the artifact; None: no run has pinned it yet."""

    PATTERN = r"run:[0-9a-z_-]+/[a-z][a-z0-9_.-]{0,70}(#[0-9a-f]{64})?"

    @property
    def is_well_formed(self) -> bool:
        """Return whether it can name a step of a run."""
        return re.fullmatch(self.PATTERN, str(self)) is not None

    @property
    def named(self) -> str:
        """The run and its step, as the command line takes them."""
        return f"{self.run}/{self.step}"

    def __str__(self) -> str:
        return f"run:{self.named}" + ("" if self.digest is None else f"#{self.digest}")


@dataclass(frozen=True)
class LocalPath:
    """A path: a model's folder, or a file of data or Python."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


FileSource = Builtin | LocalPath
"""Source of a verifier."""
DataSource = Builtin | HubDataset | HubFiles | LocalPath
ModelSource = Builtin | Hub | Package | Gguf | Registered | StageOfRun | LocalPath
PinnedSource = Registered | StageOfRun
"""Sources whose content a run pins when it begins, and whose files the process that orders the run fetches."""


def file_source(text: str) -> FileSource:
    """Parse the ``source`` of a verifier; nothing is looked up."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme != "builtin":
        return LocalPath(Path(text))
    name, slash, kind = rest.partition("/")
    return Builtin(name, kind if slash else None)


def data_source(text: str) -> DataSource:
    """Parse the ``source`` of data; nothing is looked up."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme != "hub":
        return file_source(text)
    repository, _, named = rest.partition("@")
    revision, slash, files = named.partition("/")
    return HubFiles(repository, revision, files) if slash else HubDataset(repository, revision)


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
        case "models" if rest.startswith("/"):
            return _registered(rest[1:])
        case "run":
            return stage_of_run(rest)
        case _:
            return LocalPath(Path(text))


def stage_of_run(text: str) -> StageOfRun:
    """Read ``RUN/STEP``, with or without ``#DIGEST``."""
    named, has_pin, pin = text.partition("#")
    run, _, step = named.partition("/")
    return StageOfRun(run, step, pin if has_pin else None)


def bare_stage_of_run(text: str) -> StageOfRun | None:
    """Read ``latest/STEP`` or ``NUMBER…/STEP`` without its prefix; None: the text has another form."""
    has_form = re.fullmatch(r"(latest|[0-9]+(-[a-z0-9_-]*)?)/[a-z][a-z0-9_.-]{0,70}", text)
    return stage_of_run(text) if has_form else None


def _registered(text: str) -> Registered:
    """Read ``NAME@ALIAS``, ``NAME/VERSION`` or ``NAME``, with or without ``#PIN``."""
    place, has_pin, pin = text.partition("#")
    name, has_alias, alias = place.partition("@")
    name, has_version, version = (name, "", "") if has_alias else name.partition("/")
    return Registered(
        name,
        alias=alias if has_alias else None,
        version=version if has_version else None,
        pin=pin if has_pin else None,
    )
