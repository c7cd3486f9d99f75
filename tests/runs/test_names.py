"""Each name has one meaning in each situation, by one order of meanings, or is refused with a remedy."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.review.diff.small_runs import make_run, write_recipe
from tests.support.every import every
from vantage.runs.meanings import (
    MADE,
    AmbiguousName,
    BadName,
    Command,
    DigestNamed,
    FolderNamed,
    MlflowRunNamed,
    ModelOfRun,
    Named,
    NotAccepted,
    RecipeNamed,
    RegisteredNamed,
    RunNamed,
    SeveralDigests,
    SourceNamed,
    StageNamed,
    UnknownName,
)
from vantage.runs.names import Names, named_run, recipe_source, registered_alias
from vantage.runs.run_ids import NoSuchRun, SeveralRuns
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.sources import Builtin, Gguf, Hub, Package

FIRST, LAST = "0001-quickstart-59aaf7", "0002-instruct-0a1b2c"
DIGEST = "0000000112345678" + "a" * 48
OTHER_DIGESTS = ("beef0000" + "b" * 56, "beef0000" + "c" * 56)
MLFLOW_RUN = "d" * 32

AUDIT = Command("audit", (*MADE, MlflowRunNamed, DigestNamed, FolderNamed))
DIFF = Command("diff", (*MADE, RecipeNamed))
SAMPLE = Command("sample", (*MADE, FolderNamed, SourceNamed))
SBOM = Command("sbom", MADE)
CRITIC = Command("critic", (RunNamed, StageNamed))
STATUS = Command("status", (RunNamed,))


class Models:
    """A stand-in for registered models that remembers what it was asked."""

    def __init__(self, *known: str, is_dead: bool = False) -> None:
        self.known = known
        self.is_dead = is_dead
        self.asked: list[str] = []

    def has(self, named: RegisteredNamed) -> bool:
        self.asked.append(str(named))
        if self.is_dead:
            raise ConnectionError("MLflow does not answer")
        return str(named) in self.known


NO_MODELS, DEAD = (), None
"""What MLflow has; None: it does not answer."""


@dataclass(frozen=True)
class Here:
    """The current folder, with the workspace of two runs in it."""

    path: Path
    workspace: Workspace

    @contextmanager
    def holding(self, folder: str | None) -> Iterator[None]:
        """Make a folder in the current one, inside the block."""
        if folder is not None:
            (self.path / folder).mkdir(parents=True)
        try:
            yield
        finally:
            if folder is not None:
                shutil.rmtree(self.path / Path(folder).parts[0])

    def resolve(self, text: str, command: Command, models: tuple[str, ...] | None = NO_MODELS) -> Named:
        registry = Models(is_dead=True) if models is None else Models(*models)
        digests = (DIGEST, *OTHER_DIGESTS)
        return Names(self.workspace, registry=registry, digests=lambda: digests).resolve(text, command)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    workspace = Workspace(tmp_path / "workspace")
    for run_id in (FIRST, LAST):
        (workspace.runs / run_id).mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    return Here(tmp_path / "here", workspace)


@every(
    "text, command, folder, models, meaning",
    [
        # runs
        ("latest", STATUS, None, NO_MODELS, RunNamed(LAST)),
        ("1", STATUS, None, NO_MODELS, RunNamed(FIRST)),
        ("0001-q", STATUS, None, NO_MODELS, RunNamed(FIRST)),
        ("latest", STATUS, "latest", NO_MODELS, RunNamed(LAST)),
        ("latest", CRITIC, "latest", NO_MODELS, RunNamed(LAST)),
        ("latest", SBOM, "latest", NO_MODELS, RunNamed(LAST)),
        ("latest", DIFF, "latest", NO_MODELS, RunNamed(LAST)),
        ("latest/", AUDIT, None, NO_MODELS, RunNamed(LAST)),
        ("latest", AUDIT, None, ("latest",), RunNamed(LAST)),
        ("latest", SAMPLE, None, DEAD, RunNamed(LAST)),
        ("run:latest", AUDIT, "latest", NO_MODELS, RunNamed(LAST)),
        ("run:1", STATUS, None, NO_MODELS, RunNamed(FIRST)),
        # their steps and models
        ("latest/sft", CRITIC, None, NO_MODELS, StageNamed(LAST, "sft")),
        ("1/data.prompts", SBOM, None, NO_MODELS, StageNamed(FIRST, "data.prompts")),
        ("1/model", SAMPLE, None, NO_MODELS, ModelOfRun(FIRST, "model")),
        ("1/models.judge", SAMPLE, None, NO_MODELS, ModelOfRun(FIRST, "models.judge")),
        ("run:latest/sft", AUDIT, "latest/sft", NO_MODELS, StageNamed(LAST, "sft")),
        # registered models
        ("quickstart", AUDIT, None, ("quickstart",), RegisteredNamed("quickstart")),
        ("quickstart", SBOM, None, ("quickstart",), RegisteredNamed("quickstart")),
        ("quickstart/3", SAMPLE, None, ("quickstart/3",), RegisteredNamed("quickstart", version="3")),
        ("quickstart/3", SBOM, "quickstart/3", ("quickstart/3",), RegisteredNamed("quickstart", version="3")),
        ("quickstart@champion", SBOM, None, DEAD, RegisteredNamed("quickstart", alias="champion")),
        ("models:/quickstart/3", AUDIT, None, DEAD, RegisteredNamed("quickstart", version="3")),
        ("models:/quickstart", DIFF, None, DEAD, RegisteredNamed("quickstart")),
        ("registered:quickstart", DIFF, None, ("quickstart",), RegisteredNamed("quickstart")),
        ("registered:latest", AUDIT, "latest", DEAD, RegisteredNamed("latest")),
        ("registered:7/2", SAMPLE, None, DEAD, RegisteredNamed("7", version="2")),
        ("registered:quickstart@best", SBOM, None, DEAD, RegisteredNamed("quickstart", alias="best")),
        ("7", SAMPLE, None, ("7",), RegisteredNamed("7")),
        # folders
        ("quickstart", AUDIT, "quickstart", NO_MODELS, FolderNamed(Path("quickstart"))),
        ("quickstart", AUDIT, "quickstart", DEAD, FolderNamed(Path("quickstart"))),
        ("out/model", SAMPLE, "out/model", NO_MODELS, FolderNamed(Path("out/model"))),
        ("latest/nothing", SAMPLE, None, NO_MODELS, StageNamed(LAST, "nothing")),
        ("./latest", AUDIT, "latest", NO_MODELS, FolderNamed(Path("latest"))),
        ("./nowhere", AUDIT, None, NO_MODELS, FolderNamed(Path("nowhere"))),
        ("..", SAMPLE, None, NO_MODELS, FolderNamed(Path(".."))),
        ("/nowhere", SAMPLE, None, NO_MODELS, FolderNamed(Path("/nowhere"))),
        ("folder:latest", SAMPLE, "latest", NO_MODELS, FolderNamed(Path("latest"))),
        ("x.yaml", AUDIT, "x.yaml", NO_MODELS, FolderNamed(Path("x.yaml"))),
        ("./x.yaml", AUDIT, "x.yaml", NO_MODELS, FolderNamed(Path("x.yaml"))),
        ("./builtin:tiny", SAMPLE, None, NO_MODELS, FolderNamed(Path("builtin:tiny"))),
        # recipes
        ("quickstart", DIFF, None, NO_MODELS, RecipeNamed("quickstart")),
        ("quickstart", DIFF, "quickstart", DEAD, RecipeNamed("quickstart")),
        ("mine.yaml", DIFF, None, NO_MODELS, RecipeNamed("mine.yaml")),
        ("./mine.yml", DIFF, None, NO_MODELS, RecipeNamed("./mine.yml")),
        ("./mine", DIFF, None, NO_MODELS, RecipeNamed("./mine")),
        ("recipe:quickstart", DIFF, None, ("quickstart",), RecipeNamed("quickstart")),
        # digests, and MLflow's runs
        (DIGEST, AUDIT, None, NO_MODELS, DigestNamed(DIGEST)),
        (DIGEST[:12], AUDIT, None, NO_MODELS, DigestNamed(DIGEST)),
        (DIGEST[:32], AUDIT, None, NO_MODELS, DigestNamed(DIGEST)),
        (f"digest:{DIGEST[:8]}", AUDIT, None, NO_MODELS, DigestNamed(DIGEST)),
        ("00000002", AUDIT, None, NO_MODELS, RunNamed(LAST)),
        (MLFLOW_RUN, AUDIT, None, DEAD, MlflowRunNamed(MLFLOW_RUN)),
        (f"mlflow:{MLFLOW_RUN}", AUDIT, MLFLOW_RUN, DEAD, MlflowRunNamed(MLFLOW_RUN)),
        # sources
        ("builtin:tiny", SAMPLE, "builtin:tiny", NO_MODELS, SourceNamed(Builtin("tiny"))),
        ("hub:a/b@main", SAMPLE, None, NO_MODELS, SourceNamed(Hub("a/b", "main"))),
        ("package:small-model", SAMPLE, None, NO_MODELS, SourceNamed(Package("small-model"))),
        ("gguf:x.gguf", SAMPLE, None, NO_MODELS, SourceNamed(Gguf(Path("x.gguf")))),
    ],
)
def test_a_text_has_one_meaning(
    text: str,
    command: Command,
    folder: str | None,
    models: tuple[str, ...] | None,
    meaning: Named,
    here: Here,
) -> None:
    with here.holding(folder):
        assert here.resolve(text, command, models) == meaning


@every(
    "text, command, folder, models, refusal, said",
    [
        # two meanings that the command accepts
        ("latest", AUDIT, "latest", NO_MODELS, AmbiguousName, f"latest means a folder and run {LAST}; write folder:latest or run:latest"),
        ("latest", SAMPLE, "latest", NO_MODELS, AmbiguousName, f"latest means a folder and run {LAST}; write folder:latest or run:latest"),
        ("latest/sft", AUDIT, "latest/sft", NO_MODELS, AmbiguousName, f"write folder:latest/sft or run:{LAST}/sft"),
        ("quickstart", AUDIT, "quickstart", ("quickstart",), AmbiguousName, "means a folder and a registered model; write folder:quickstart or registered:quickstart"),
        ("quickstart/3", SAMPLE, "quickstart/3", ("quickstart/3",), AmbiguousName, "write folder:quickstart/3 or registered:quickstart/3"),
        ("quickstart@best", AUDIT, "quickstart@best", DEAD, AmbiguousName, "write folder:quickstart@best or registered:quickstart@best"),
        ("quickstart", DIFF, None, ("quickstart",), AmbiguousName, "write recipe:quickstart or registered:quickstart"),
        ("00000001", AUDIT, None, NO_MODELS, AmbiguousName, f"means artifact {DIGEST[:20]} and run {FIRST}; write digest:{DIGEST} or run:00000001"),
        (DIGEST, AUDIT, DIGEST, NO_MODELS, AmbiguousName, f"write folder:{DIGEST} or digest:{DIGEST}"),
        (MLFLOW_RUN, AUDIT, MLFLOW_RUN, NO_MODELS, AmbiguousName, f"write folder:{MLFLOW_RUN} or mlflow:{MLFLOW_RUN}"),
        ("000", SAMPLE, "000", NO_MODELS, AmbiguousName, "means a folder and the beginning of several runs; write folder:000 or more of the run's id"),
        # several things of one kind
        ("000", STATUS, None, NO_MODELS, SeveralRuns, f"000 fits {FIRST}, {LAST}; give more of the id"),
        ("000", DIFF, None, ("000",), SeveralRuns, f"000 fits {FIRST}, {LAST}; give more of the id"),
        ("beef0000", AUDIT, None, NO_MODELS, SeveralDigests, "beef0000 fits 2 artifacts (beef0000bbbbbbbbbbbb, beef0000cccccccccccc); give more of the digest"),
        # one meaning, which the command does not accept
        ("quickstart", SBOM, None, NO_MODELS, NotAccepted, "quickstart is a recipe, not a result of a run; `"),
        ("quickstart", AUDIT, None, NO_MODELS, NotAccepted, "quickstart is a recipe, not a result of a run; `"),
        ("quickstart", STATUS, None, NO_MODELS, NotAccepted, "run 'quickstart' is not one of Vantage's: quickstart is a recipe, not a result of a run; `"),
        ("small", STATUS, None, ("small",), NotAccepted, "run 'small' is not one of Vantage's: small is a registered model; `"),
        ("small@best", CRITIC, None, DEAD, NotAccepted, "small@best is a registered model; `"),
        ("registered:small", CRITIC, None, DEAD, NotAccepted, "registered:small is a registered model; `"),
        ("latest/sft", STATUS, None, NO_MODELS, NotAccepted, f"latest/sft is sft of run {LAST}; `"),
        ("latest/model", CRITIC, None, NO_MODELS, NotAccepted, f"latest/model is model of run {LAST}; `"),
        ("docs", SBOM, "docs", NO_MODELS, NotAccepted, "docs is a folder; `"),
        ("../etc", STATUS, None, NO_MODELS, NotAccepted, "run '../etc' is not one of Vantage's: ../etc is a path; `"),
        ("folder:latest", DIFF, "latest", NO_MODELS, NotAccepted, "folder:latest is a folder; `"),
        ("recipe:quickstart", AUDIT, None, ("quickstart",), NotAccepted, "recipe:quickstart is a recipe, not a result of a run; `"),
        ("x.yaml", SAMPLE, None, NO_MODELS, NotAccepted, "x.yaml is a recipe, not a result of a run; `"),
        ("./x.yaml", AUDIT, None, NO_MODELS, NotAccepted, "./x.yaml is a recipe, not a result of a run; `"),
        ("builtin:tiny", DIFF, None, NO_MODELS, NotAccepted, "builtin:tiny is the source of a model; `"),
        (MLFLOW_RUN, SBOM, None, NO_MODELS, NotAccepted, f"{MLFLOW_RUN} is the id of one of MLflow's runs; `"),
        (DIGEST[:9], SBOM, None, NO_MODELS, NotAccepted, f"{DIGEST[:9]} is artifact {DIGEST[:20]}; `"),
        # no meaning
        ("nothing", STATUS, None, NO_MODELS, NoSuchRun, "there is no run nothing in"),
        ("nothing", STATUS, None, DEAD, NoSuchRun, "there is no run nothing in"),
        ("nothing/sft", CRITIC, None, NO_MODELS, NoSuchRun, "there is no run nothing in"),
        ("run:nothing", AUDIT, "nothing", ("nothing",), NoSuchRun, "there is no run nothing in"),
        ("nothing", AUDIT, None, NO_MODELS, UnknownName, "nothing is no run, no digest, no folder, and no registered model of MLflow at sqlite:"),
        ("nothing", DIFF, None, NO_MODELS, UnknownName, "nothing is no recipe, no run, and no registered model"),
        ("nothing/3", SBOM, None, ("nothing",), UnknownName, "nothing/3 is no run and no registered model"),
        ("", SBOM, None, NO_MODELS, UnknownName, "run '' is not one of Vantage's"),
        ("feedfeed", AUDIT, None, NO_MODELS, UnknownName, "feedfeed is no run, no digest"),
        ("nothing", SBOM, None, DEAD, ConnectionError, "MLflow does not answer"),
        ("quickstart", AUDIT, None, DEAD, ConnectionError, "MLflow does not answer"),
        # forms that cannot be
        ("org/name@main", SBOM, None, NO_MODELS, BadName, "'org/name' is no name of a registered model"),
        ("@best", SBOM, None, NO_MODELS, BadName, "'' is no name of a registered model"),
        ("models:/small/one", SBOM, None, NO_MODELS, BadName, "'one' is no version of a registered model; give a number, as in small/1"),
        (f"models:/small/3#{DIGEST}", SBOM, None, NO_MODELS, BadName, "a digest after # is allowed only in a recipe"),
        ("registered:x'y", AUDIT, None, NO_MODELS, BadName, "is no name of a registered model"),
        ("digest:feedfeed", AUDIT, None, NO_MODELS, BadName, "has the digest feedfeed; give 8 letters or more"),
        ("folder:", AUDIT, None, NO_MODELS, BadName, "folder: names nothing; write what is meant after the colon"),
        ("~no-such-user/x", AUDIT, None, NO_MODELS, BadName, "~no-such-user/x: there is no such user"),
    ],
)  # fmt: skip
def test_a_text_with_no_or_several_accepted_meanings_is_refused(
    text: str,
    command: Command,
    folder: str | None,
    models: tuple[str, ...] | None,
    refusal: type[Exception],
    said: str,
    here: Here,
) -> None:
    with here.holding(folder), pytest.raises(refusal) as refused:
        here.resolve(text, command, models)
    assert type(refused.value) is refusal
    assert said in str(refused.value)
    assert isinstance(refused.value, RunError) != (refusal is ConnectionError), "exit codes follow from it"


@pytest.mark.parametrize("command", [AUDIT, DIFF, SAMPLE])
def test_every_spelling_of_an_ambiguous_name_has_one_meaning(command: Command, here: Here) -> None:
    """The error's remedies work, and lead to different things."""
    (here.path / "quickstart").mkdir()
    (here.path / "latest").mkdir()
    for text in ("quickstart", "latest") if command is not DIFF else ("quickstart",):
        with pytest.raises(AmbiguousName) as refused:
            here.resolve(text, command, ("quickstart",))
        found = [here.resolve(each, command, ("quickstart",)) for each in refused.value.spellings]
        assert len(set(found)) == len(found) == 2
        assert all(type(each) in command.accepts for each in found)


def test_what_a_refusal_says_is_accepted(here: Here) -> None:
    with pytest.raises(NotAccepted) as refused:
        here.resolve("quickstart", DIFF_OF_RUNS := Command("some", (RunNamed, StageNamed, RegisteredNamed)))
    assert str(refused.value).endswith(
        "some` accepts RUN, RUN/STAGE, or NAME, NAME@ALIAS or NAME/VERSION of a registered model"
    )
    assert (refused.value.text, refused.value.command) == ("quickstart", DIFF_OF_RUNS)
    assert refused.value.meaning == RecipeNamed("quickstart")


def test_mlflow_is_asked_about_names_that_nothing_else_has_and_about_doubtful_ones(here: Here) -> None:
    models = Models("small")
    names = Names(here.workspace, registry=models, digests=tuple)
    for text in ("latest", "1/sft", "small@best", "models:/small", "/small", MLFLOW_RUN):
        names.resolve(text, AUDIT)
    with pytest.raises(NoSuchRun):
        names.resolve("7", STATUS)
    assert models.asked == []
    names.resolve("small", AUDIT)
    names.resolve("quickstart", DIFF)
    assert models.asked == ["small", "quickstart"]


def test_a_stage_that_its_run_does_not_have_is_no_second_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path / "workspace")
    record = make_run(workspace, write_recipe(tmp_path, range(9)))
    monkeypatch.chdir(tmp_path)
    for step in ("nothing", "sft", "data.prompts"):
        (tmp_path / "latest" / step).mkdir(parents=True)
    names = Names(workspace, registry=Models())
    assert names.resolve("latest/nothing", AUDIT) == FolderNamed(Path("latest/nothing"))
    for step in ("sft", "data.prompts"):
        with pytest.raises(AmbiguousName, match=f"run:{record.run_id}/{step}"):
            names.resolve(f"latest/{step}", AUDIT)
    digest = str(record.stages["sft"].digest)
    with pytest.raises(NotAccepted, match=f"is artifact {digest[:20]}"):  # as the runs have recorded it
        names.resolve(digest[:10], SBOM)


def test_commands_that_accept_runs_alone(here: Here) -> None:
    assert named_run(here.workspace, "run:1", "resume") == FIRST
    with pytest.raises(NotAccepted, match="resume` accepts RUN"):
        named_run(here.workspace, "latest/sft", "resume")


def test_commands_that_accept_recipes_alone() -> None:
    assert recipe_source("recipe:quickstart", "run") == "quickstart"
    assert recipe_source("C:/mine.yaml", "run") == "C:/mine.yaml"
    for text in ("run:latest", "registered:quickstart", "recipe:"):
        with pytest.raises(BadName, match="names no recipe; .*plan` accepts a recipe's file or name"):
            recipe_source(text, "plan")


@pytest.mark.parametrize("text", ["small@best", "models:/small@best", "registered:small@best"])
def test_an_alias_that_is_moved(text: str) -> None:
    assert registered_alias(text, "rollback") == ("small", "best")


@every("text", ["small", "small/3", "small@", "run:latest", "@best"])
def test_what_is_no_alias(text: str) -> None:
    with pytest.raises(BadName, match="is not MODEL@ALIAS|is no name of a registered model"):
        registered_alias(text, "rollback")
