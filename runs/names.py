"""Resolve a name on the command line: one order of meanings for all commands (docs/names.md).

A command states which meanings it accepts. A text with one accepted meaning has that meaning. A text with several is
refused, and the error lists the spelling of each. A text without an accepted meaning is refused with the meaning that it has.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

from vantage.runs.meanings import (
    PREFIX_OF,
    RECIPE_SUFFIXES,
    RUNS,
    STEPS,
    AmbiguousName,
    BadName,
    Command,
    DigestNamed,
    FolderNamed,
    MlflowRunNamed,
    ModelOfRun,
    Named,
    NotAccepted,
    OfRun,
    RecipeNamed,
    RegisteredNamed,
    RunNamed,
    SeveralDigests,
    SourceNamed,
    StageNamed,
    UnknownName,
    is_bare_model,
    registered,
)
from vantage.runs.registry import MlflowRegistry
from vantage.runs.run import read_run, read_runs
from vantage.runs.run_ids import LATEST, NoSuchRun, SeveralRuns, find_run
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.loading.recipe_file import builtin_recipes
from vantage.schemas.recipe.inputs import MODEL
from vantage.schemas.recipe.sources import LocalPath, Registered, model_source
from vantage.schemas.steps import OTHER_MODEL_PREFIX, dependencies

_PATH_BEGINS = ("/", ".", "~")
_MLFLOW_RUN = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


class Registry(Protocol):
    """Lookup of registered models."""

    def has(self, named: RegisteredNamed) -> bool:
        """Return whether the version exists. Raises ConnectionError without an answer."""


class Names:
    """Resolves names in a workspace."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        registry: Registry | None = None,
        digests: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """
        Args:
            workspace: the workspace with the runs.
            registry: MLflow's registered models; None: the models of the workspace's server.
            digests: content digests that may be named; None: the digests that runs have recorded.
        """
        self.workspace = workspace
        self.registry = registry or MlflowRegistry(workspace)
        self._digests = digests or self._recorded_digests

    def resolve(self, text: str, command: Command) -> Named:
        """Find the one thing that ``text`` means to the command.

        Raises:
            AmbiguousName, NotAccepted, UnknownName: the text has several meanings, one that is not accepted, or none.
            NoSuchRun, SeveralRuns, SeveralDigests, BadName: the text can only be a run, a digest or a registered model, and
                there is none or there are several.
            ConnectionError: the text can only be a registered model, and MLflow does not answer.
        """
        certain = self._by_prefix(text) or _by_path(text, command)
        if certain is not None:
            if type(certain) not in command.accepts:
                raise NotAccepted(text, command, certain)
            return certain
        accepted = [*self._looked_up(text, command.accepts)]
        runs = self._runs(text)
        if isinstance(runs, OfRun) and type(runs) in command.accepts:
            accepted.append(runs)
        if isinstance(runs, NoSuchRun) and RegisteredNamed in command.accepts:
            accepted += self._registered(text, is_only=not accepted)
        if len(accepted) > 1:
            accepted = [each for each in accepted if self._exists(each)]
        if isinstance(runs, SeveralRuns):
            if accepted:
                raise AmbiguousName(text, command, accepted, several="the beginning of several runs")
            raise runs
        if len(accepted) > 1:
            raise AmbiguousName(text, command, accepted)
        if accepted:
            return accepted[0]
        if isinstance(runs, OfRun):
            raise NotAccepted(text, command, runs)
        raise self._why_not(text, command, runs)

    def _by_prefix(self, text: str) -> Named | None:
        """Return the only meaning of a text with a prefix; None: the text has no prefix."""
        prefix, colon, rest = text.partition(":")
        if not colon or prefix not in PREFIX_OF.values():
            source = model_source(text)
            if isinstance(source, Registered):
                return registered(text.removeprefix("models:/"))
            return None if isinstance(source, LocalPath) else SourceNamed(source)
        if not rest:
            raise BadName(f"{text} names nothing; write what is meant after the colon")
        match prefix:
            case "run":
                return _of_run(self.workspace, rest)
            case "folder":
                return FolderNamed(_path(rest))
            case "recipe":
                return RecipeNamed(rest)
            case "mlflow":
                return MlflowRunNamed(rest)
            case "digest":
                return self._digest(rest)
        return registered(rest)

    def _digest(self, text: str) -> DigestNamed:
        digests = self._fitting_digests(text)
        if not digests:
            raise BadName(
                f"no artifact of {self.workspace.address} has the digest {text}; give 8 letters or more of one"
            )
        return DigestNamed(digests[0])

    def _fitting_digests(self, text: str) -> list[str]:
        """Return the digests that begin with the text. Raises SeveralDigests if there are several."""
        if not _DIGEST.fullmatch(text):
            return []
        digests = sorted({each for each in self._digests() if each.startswith(text)})
        if len(digests) > 1:
            raise SeveralDigests(text, digests)
        return digests

    def _recorded_digests(self) -> set[str]:
        return {
            stage.digest
            for record in read_runs(self.workspace)
            for stage in record.stages.values()
            if stage.digest is not None
        }

    def _looked_up(self, text: str, wanted: Collection[type[Named]]) -> Iterator[Named]:
        """Yield the meanings of these kinds, apart from runs and registered models."""
        if FolderNamed in wanted and os.path.isdir(text):
            yield FolderNamed(Path(text))
        if RecipeNamed in wanted and (text.endswith(RECIPE_SUFFIXES) or text in builtin_recipes()):
            yield RecipeNamed(text)
        digests = self._fitting_digests(text) if DigestNamed in wanted else []
        if digests:
            yield DigestNamed(digests[0])
        elif MlflowRunNamed in wanted and _MLFLOW_RUN.fullmatch(text):
            yield MlflowRunNamed(text)

    def _runs(self, text: str) -> OfRun | NoSuchRun | SeveralRuns:
        """Return the run or step that the text means, or the reason why it means none."""
        try:
            return _of_run(self.workspace, text)
        except (NoSuchRun, SeveralRuns) as error:
            return error

    def _registered(self, text: str, *, is_only: bool) -> list[Named]:
        """Return the registered model that the text means, if there is one; MLflow is asked if the text's form leaves it open.

        Args:
            is_only: whether the text has no other meaning, so that MLflow has to answer.
        """
        if "@" in text:
            try:
                return [registered(text)]
            except BadName:
                if is_only:
                    raise
                return []
        if not is_bare_model(text):
            return []
        named = registered(text)
        try:
            return [named] if self.registry.has(named) else []
        except ConnectionError:
            if is_only:
                raise
            return []

    def _exists(self, named: Named) -> bool:
        """Return whether a run has the named step; all other meanings have been looked up already."""
        if not isinstance(named, StageNamed | ModelOfRun):
            return True
        try:
            record = read_run(self.workspace, named.run_id)
        except RunError:
            return True
        return named.step in {*record.stages, *dependencies(record.recipe)}

    def _why_not(self, text: str, command: Command, no_run: NoSuchRun) -> RunError:
        """Return the error for a text that has no accepted meaning."""
        try:
            others = [*self._looked_up(text, [each for each in PREFIX_OF if each not in command.accepts])]
        except SeveralDigests:
            others = []
        if others:
            return NotAccepted(text, command, others[0])
        if RegisteredNamed not in command.accepts and not (text[:1].isdecimal() or text == LATEST):
            try:
                models = self._registered(text, is_only=False)
            except BadName:
                models = []
            if models:
                return NotAccepted(text, command, models[0])
        if set(command.accepts) <= {*STEPS}:
            return no_run
        return UnknownName(text, command, self.workspace, no_run)


def named_run(workspace: Workspace, text: str, command: str) -> str:
    """Return the id of the run that ``text`` means to a command that accepts nothing else.

    Raises:
        RunError: the text is not a run; the message says what it is.
    """
    named = Names(workspace).resolve(text, Command(command, RUNS))
    assert isinstance(named, RunNamed), "it accepts nothing else"
    return named.run_id


def recipe_source(text: str, command: str) -> str:
    """Return the file or name of a recipe, without ``recipe:``. The loader checks whether it exists.

    Raises:
        BadName: the text has another prefix.
    """
    prefix, colon, rest = text.partition(":")
    if not colon or prefix not in PREFIX_OF.values():
        return text
    if prefix != "recipe" or not rest:
        raise BadName(
            f"{text} names no recipe; {Command(command, (RecipeNamed,))} accepts {RecipeNamed.FORM}"
        )
    return rest


def registered_alias(text: str, command: str) -> tuple[str, str]:
    """Return the name and the alias of ``NAME@ALIAS`` of a registered model; nothing is looked up.

    Raises:
        BadName: the text has another form.
    """
    named = registered(text.removeprefix("models:/").removeprefix("registered:"))
    if named.alias is None:
        raise BadName(
            f"{text!r} is not MODEL@ALIAS, as in quickstart@champion, which {Command(command, (RegisteredNamed,))} moves"
        )
    return named.name, named.alias


def _of_run(workspace: Workspace, text: str) -> OfRun:
    """Resolve ``RUN``, ``RUN/STAGE``, ``RUN/model`` or ``RUN/models.NAME``. Raises NoSuchRun or SeveralRuns for the part
    before the slash."""
    run, _, step = text.partition("/")
    run_id = find_run(workspace, run)
    if not step:
        return RunNamed(run_id)
    if step == MODEL or step.startswith(OTHER_MODEL_PREFIX):
        return ModelOfRun(run_id, step)
    return StageNamed(run_id, step)


def _by_path(text: str, command: Command) -> Named | None:
    """Return the only meaning of a text that begins like a path; None: it does not."""
    if not text.startswith(_PATH_BEGINS):
        return None
    is_recipe = text.endswith(RECIPE_SUFFIXES) and not os.path.isdir(text)
    if is_recipe or (RecipeNamed in command.accepts and FolderNamed not in command.accepts):
        return RecipeNamed(text)
    return FolderNamed(_path(text))


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # the text is ~NAME, and there is no such user
        raise BadName(f"{text}: there is no such user; write the path in full") from None
