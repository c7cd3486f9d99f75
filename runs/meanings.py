"""Meanings of a text on the command line, and the errors for a text that has none or several (docs/names.md)."""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vantage.ledger import tracking
from vantage.runs.own_commands import program
from vantage.runs.run_ids import NoSuchRun
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.sources import ModelSource, Registered, model_source

RECIPE_SUFFIXES = (".yaml", ".yml")
_BARE_MODEL = re.compile(r"[^@/:'\"`\\\x00-\x1f]+(/[1-9][0-9]*)?")
_DIGESTS_SHOWN = 5


@dataclass(frozen=True)
class RunNamed:
    """A run: ``latest``, its id, the beginning of its id, or its number."""

    run_id: str

    FORM: ClassVar = "RUN"

    def described(self) -> str:
        """Describe the run in words."""
        return f"run {self.run_id}"


@dataclass(frozen=True)
class StageNamed:
    """A step of a run: ``RUN/STAGE``, also ``RUN/data.NAME``. The command checks whether the run has the step."""

    run_id: str
    step: str

    FORM: ClassVar = "RUN/STAGE"

    def described(self) -> str:
        """Describe the step in words."""
        return f"{self.step} of run {self.run_id}"


@dataclass(frozen=True)
class ModelOfRun:
    """A model that a run imported: ``RUN/model``, or ``RUN/models.NAME``."""

    run_id: str
    step: str

    FORM: ClassVar = "RUN/model"

    def described(self) -> str:
        """Describe the model in words."""
        return f"{self.step} of run {self.run_id}"


@dataclass(frozen=True)
class RegisteredNamed:
    """A version of a registered model, by its alias or number; without both, the newest."""

    name: str
    alias: str | None = None
    version: str | None = None

    FORM: ClassVar = "NAME, NAME@ALIAS or NAME/VERSION of a registered model"

    def described(self) -> str:
        """Describe the version in words."""
        return "a registered model"

    def __str__(self) -> str:
        return self.name + (f"@{self.alias}" if self.alias else f"/{self.version}" if self.version else "")


@dataclass(frozen=True)
class FolderNamed:
    """A folder, which need not exist if its path was written as one."""

    path: Path

    FORM: ClassVar = "a folder"

    def described(self) -> str:
        """Describe the folder in words."""
        return "a folder" if os.path.isdir(self.path) else "a path"


@dataclass(frozen=True)
class DigestNamed:
    """An artifact, by its content digest."""

    digest: str

    FORM: ClassVar = "a digest of 8 letters or more"

    def described(self) -> str:
        """Describe the artifact in words."""
        return f"artifact {self.digest[:20]}"


@dataclass(frozen=True)
class MlflowRunNamed:
    """One of MLflow's runs, by its id."""

    mlflow_run_id: str

    FORM: ClassVar = "the id of one of MLflow's runs"

    def described(self) -> str:
        """Describe the run in words."""
        return "the id of one of MLflow's runs"


@dataclass(frozen=True)
class RecipeNamed:
    """A recipe's file, or a built-in recipe."""

    source: str

    FORM: ClassVar = "a recipe's file or name"

    def described(self) -> str:
        """Describe the recipe in words."""
        return "a recipe"


@dataclass(frozen=True)
class SourceNamed:
    """A model from elsewhere, as in a recipe's ``model.source``."""

    source: ModelSource

    FORM: ClassVar = "a source as in a recipe (builtin:tiny, gguf:FILE …)"

    def described(self) -> str:
        """Describe the model in words."""
        return "the source of a model"


Named = (
    RunNamed
    | StageNamed
    | ModelOfRun
    | RegisteredNamed
    | FolderNamed
    | DigestNamed
    | MlflowRunNamed
    | RecipeNamed
    | SourceNamed
)
OfRun = RunNamed | StageNamed | ModelOfRun

RUNS: tuple[type[Named], ...] = (RunNamed,)
STEPS: tuple[type[Named], ...] = (RunNamed, StageNamed, ModelOfRun)
MADE: tuple[type[Named], ...] = (*STEPS, RegisteredNamed)
"""Meanings of things that runs have made, in a workspace and in MLflow."""

PREFIX_OF: dict[type[Named], str] = {
    FolderNamed: "folder",
    RecipeNamed: "recipe",
    DigestNamed: "digest",
    MlflowRunNamed: "mlflow",
    RunNamed: "run",
    StageNamed: "run",
    ModelOfRun: "run",
    RegisteredNamed: "registered",
}


@dataclass(frozen=True)
class Command:
    """A command, and the meanings that it accepts."""

    name: str
    accepts: tuple[type[Named], ...]

    def __str__(self) -> str:
        return f"`{program('vantage')} {self.name}`"

    @property
    def forms(self) -> str:
        """Return the accepted forms, in one line."""
        return _listed([each.FORM for each in self.accepts], "or")


class NameRefused(RunError):
    """A text does not name anything that a command can work on."""

    def __init__(self, text: str, command: Command, message: str) -> None:
        super().__init__(message)
        self.text = text
        self.command = command


class AmbiguousName(NameRefused):
    """A text has several meanings that the command accepts."""

    def __init__(self, text: str, command: Command, meanings: Collection[Named], several: str = "") -> None:
        described = [*(each.described() for each in meanings), *([several] if several else [])]
        self.spellings = [
            *(spelling(text, each) for each in meanings),
            *(["more of the run's id"] if several else []),
        ]
        super().__init__(
            text,
            command,
            f"{text} means {_listed(described, 'and')}; write {_listed(self.spellings, 'or')}",
        )


class NotAccepted(NameRefused):
    """A text has meanings, but the command accepts none of them."""

    def __init__(self, text: str, command: Command, meaning: Named) -> None:
        self.meaning = meaning
        note = ", not a result of a run" if isinstance(meaning, RecipeNamed) else ""
        said = f"{text} is {meaning.described()}{note}; {command} accepts {command.forms}"
        if set(command.accepts) <= {RunNamed, StageNamed}:
            said = (
                f"run {text!r} is not one of Vantage's: {said} (`{program('vantage')} status` lists the runs)"
            )
        super().__init__(text, command, said)


class UnknownName(NameRefused):
    """A text has no meaning."""

    def __init__(self, text: str, command: Command, workspace: Workspace, no_run: NoSuchRun) -> None:
        self.no_run = no_run
        server = tracking.without_password(tracking.address(None, workspace.root))
        nouns = {
            RecipeNamed: "no recipe",
            RunNamed: "no run",
            DigestNamed: "no digest",
            FolderNamed: "no folder",
            RegisteredNamed: f"no registered model of MLflow at {server}",
        }
        super().__init__(
            text,
            command,
            f"{text} is {_listed([noun for kind, noun in nouns.items() if kind in command.accepts], 'and')} ({no_run}); "
            f"give {command.forms} (--workspace PLACE: where the runs are)",
        )


class BadName(RunError):
    """A text has the form of one kind of name, but is not a valid name of that kind."""


class SeveralDigests(RunError):
    """The beginning of a digest fits several artifacts."""

    def __init__(self, text: str, digests: Collection[str]) -> None:
        shown = ", ".join(each[:20] for each in [*digests][:_DIGESTS_SHOWN])
        super().__init__(f"{text} fits {len(digests)} artifacts ({shown}); give more of the digest")


def registered(text: str) -> RegisteredNamed:
    """Parse ``NAME``, ``NAME@ALIAS`` or ``NAME/VERSION``; nothing is looked up.

    Raises:
        BadName: no registered model can have this name, version or alias.
    """
    parsed = model_source(f"models:/{text}")
    assert isinstance(parsed, Registered), "by its beginning"
    if parsed.pin is not None:
        raise BadName(
            f"{text}: a digest after # is allowed only in a recipe; give NAME@ALIAS or NAME/VERSION"
        )
    if not parsed.name or set(parsed.name) & set("/:'\"`\\"):
        raise BadName(
            f"{text}: {parsed.name!r} is no name of a registered model: it is empty, or has a slash, a colon, a quotation mark "
            "or a backslash; give NAME, NAME@ALIAS or NAME/VERSION"
        )
    if parsed.version is not None and not re.fullmatch(r"[1-9][0-9]*", parsed.version):
        raise BadName(
            f"{text}: {parsed.version!r} is no version of a registered model; give a number, as in {parsed.name}/1"
        )
    return RegisteredNamed(parsed.name, alias=parsed.alias or None, version=parsed.version)


def is_bare_model(text: str) -> bool:
    """Return whether a text without ``@`` or a prefix may be ``NAME`` or ``NAME/VERSION`` of a registered model."""
    return bool(_BARE_MODEL.fullmatch(text)) and not (
        text.endswith(RECIPE_SUFFIXES) or re.fullmatch(r"[0-9a-f]{32,64}", text)
    )


def spelling(text: str, meaning: Named) -> str:
    """Return the spelling of the text that has only this meaning."""
    if isinstance(meaning, DigestNamed):
        return f"digest:{meaning.digest}"
    if isinstance(meaning, StageNamed | ModelOfRun):
        return f"run:{meaning.run_id}/{meaning.step}"
    return f"{PREFIX_OF[type(meaning)]}:{text}"


def _listed(texts: Collection[str], word: str) -> str:
    *first, last = texts
    comma = "," if len(first) > 1 else ""
    return f"{', '.join(first)}{comma} {word} {last}" if first else last
