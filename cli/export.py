"""``vantage export``: write a model of a run, or one in MLflow, as a plain Hugging Face folder."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from vantage.ledger.entries import RunEntry
    from vantage.review.exports.exported_card import MadeBy
    from vantage.runs.named_models import Origin
    from vantage.runs.workspace import Workspace
    from vantage.schemas.kind import ArtifactKind
    from vantage.schemas.records.sampling import ModelOpened


def export(
    named: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/STAGE]|MODEL",
            help="A run (its published policy, else its last), a stage of it (or model, models.NAME of its recipe), or a "
            "registered model of MLflow: NAME, "
            "NAME@ALIAS, NAME/VERSION.",
            autocompletion=complete_run,
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="A new or an empty folder. It may be left out with --push."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="hub:ORG/NAME|s3://…|gs://…|az://…",
            help="Also audit the folder and upload it there, whole or not at all. The login is taken from the environment.",
        ),
    ] = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write a policy or a reward model as a Hugging Face folder, which other programs load and serve."""
    with explained(verbose), ExitStack() as stack:
        from vantage.review.exports.exporting import ExportRefused, check_target
        from vantage.review.exports.pushing import place_named
        from vantage.review.exports.pushing import push as push_folder

        goal = None if push is None else place_named(push)
        if folder is not None:
            target = folder.expanduser()
        elif goal is not None:
            target = Path(stack.enter_context(TemporaryDirectory(prefix="vantage-push-"))) / "model"
        else:
            raise ExportRefused("FOLDER is missing; name a new folder, or a place with --push")
        check_target(target)
        place = workspace_at(workspace)
        done = _write(place, named, target, known_as=None if goal is None else goal.name_in_card)
        facts = done.written if folder is None else done.written | {"folder": str(target)}
        if not as_json:
            _print_written(done, target if folder is not None else None)
        if goal is not None:
            address, report = push_folder(target, goal, place)
            facts |= {"pushed": address, "audit": report.outcome}
            if not as_json:
                print(f"audited ({report.outcome}), published and read back: {address}")
        if as_json:
            print_json(facts)


class _Written(NamedTuple):
    """A folder that was written."""

    label: str
    written: dict[str, Any]
    """Content of its ``vantage.json``."""
    opened: "ModelOpened | None"
    is_merged: bool


def _write(place: "Workspace", named: str, target: Path, *, known_as: Path | None) -> _Written:
    """Write the folder of the named model."""
    from vantage.attempts.launchers.sampling_process import open_model
    from vantage.review.exports.exporting import check_adapters
    from vantage.review.exports.exporting import export as export_model
    from vantage.runs.meanings import MADE, Command
    from vantage.runs.named_models import open_named_model
    from vantage.schemas.records.sampling import OpenModel
    from vantage.signing.statements import is_about
    from vantage.storage.signatures import read_signatures

    kinds: tuple[ArtifactKind, ...] = ("policy", "reward_model")
    with (
        open_named_model(place, named, Command("export", MADE), kinds=kinds) as model,
        ExitStack() as stack,
    ):
        assert model.origin is not None, "runs made it"
        opened = merged = None
        if model.kind == "policy" or model.base is not None:
            opening = OpenModel(
                folder=model.folder,
                base=model.base,
                generation=model.generation,
                chat=model.chat,
                date=model.date,
            )
            process = stack.enter_context(open_model(opening))
            described = process.opened()
            opened = described if model.kind == "policy" else None
        if model.base is not None:
            check_adapters(model)
            merged = Path(stack.enter_context(TemporaryDirectory(prefix="vantage-merge-"))) / "model"
            process.merge(merged)
        storage = place.existing_storage
        stored = [] if storage is None else read_signatures(storage, model.origin.stage_key)
        written = export_model(
            model,
            opened,
            target,
            merged=merged,
            signatures=[each for each in stored if is_about(each.statement, model.origin.digest)],
            entry=_entry_of(place, model.origin),
            made_by=_maker_of(place, model.origin),
            known_as=known_as,
        )
    return _Written(model.label, written, opened, merged is not None)


def _print_written(done: _Written, target: Path | None) -> None:
    """Print what was written; ``target`` None: it was written into a temporary folder."""
    print(done.label if target is None else f"{done.label} → {target}")
    compared = "of adapters merged into their model" if done.is_merged else "compared with the store"
    print(f"digest {done.written['digest'][:12]}, {len(done.written['files'])} files {compared}")
    if target is None:
        return
    for folders in done.written.get("signatures", {}).values():
        _print_check(target, folders[0])
    if done.opened is not None:
        _print_use(target, uses_chat=done.opened.uses_chat)


def _entry_of(place: "Workspace", origin: "Origin") -> "RunEntry | None":
    """Return the run that made the model, if it is in this workspace."""
    from vantage.runs.view import Broken, Missing, RunView

    entry = RunView(place, origin.run_id).entry()
    if isinstance(entry, Missing | Broken):
        return None
    stage = entry.stages.get(origin.stage)
    known = stage is not None and stage.artifact is not None and stage.artifact.stage_key == origin.stage_key
    return entry if known else None


def _maker_of(place: "Workspace", origin: "Origin") -> "MadeBy | None":
    """Return the run that made the model, if the named run only reused it from the store."""
    from vantage.review.exports.exported_card import MadeBy
    from vantage.runs.view import Maker, RunView

    maker = RunView(place, origin.run_id).maker(origin.stage)
    if not isinstance(maker, Maker) or maker.run.run_id == origin.run_id:
        return None
    return MadeBy(maker.run.run_id, maker.step)


def _print_check(folder: Path, signed: str) -> None:
    import shlex

    statement = shlex.quote(str(folder / signed / "statement.json"))
    signature = shlex.quote(str(folder / signed / "signature.sigstore.json"))
    print(f"signed:     model_signing verify key {statement} --signature {signature} --public_key KEY.pub")


def _can_serve() -> bool:
    """Return whether the imports of `transformers serve` are installed, which transformers alone does not bring."""
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in ("openai", "fastapi", "uvicorn"))


def _port(usual: int) -> str:
    """Return the option for another port if the usual one is taken."""
    from vantage.runs.own_commands import usable_port

    port = usable_port(usual)
    return "" if port == usual else f" --port {port}"


def _print_use(folder: Path, *, uses_chat: bool) -> None:
    import shlex

    from vantage.runs.own_commands import program

    place = shlex.quote(str(folder))
    how = (
        "chat/completions"
        if uses_chat
        else "completions (plain prompts: it was trained without a chat template)"
    )
    needs = "" if _can_serve() else "      # after: pip install 'transformers[serving]'"
    print(f"serve it:   {program('transformers')} serve {place}{_port(8000)}{needs}")
    print(f"            vllm serve {place}      # where vLLM is installed")
    print(f"            {program('mlflow')} models serve -m {place} --env-manager local{_port(5000)}")
    print(f"ask it:     /v1/{how}; {folder / 'README.md'} has the commands")
