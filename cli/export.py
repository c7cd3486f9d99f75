"""``vantage export``: write a model of a run, or one in MLflow, as a plain Hugging Face folder."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from vantage.ledger.entries import RunEntry
    from vantage.review.exports.exported_card import MadeBy
    from vantage.runs.named_models import Origin
    from vantage.runs.workspace import Workspace
    from vantage.schemas.kind import ArtifactKind


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
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or an empty folder.")],
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write a policy or a reward model as a Hugging Face folder, which other programs load and serve."""
    with explained(verbose):
        from vantage.attempts.launchers.sampling_process import open_model
        from vantage.review.exports.exporting import check_adapters, check_target
        from vantage.review.exports.exporting import export as export_model
        from vantage.runs.meanings import MADE, Command
        from vantage.runs.named_models import open_named_model
        from vantage.schemas.records.sampling import OpenModel
        from vantage.signing.statements import is_about
        from vantage.storage.signatures import read_signatures

        target = folder.expanduser()
        check_target(target)
        place = workspace_at(workspace)
        kinds: tuple[ArtifactKind, ...] = ("policy", "reward_model")
        with open_named_model(place, named, Command("export", MADE), kinds=kinds) as model:
            assert model.origin is not None, "runs made it"
            with ExitStack() as stack:
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
                signatures = [each for each in stored if is_about(each.statement, model.origin.digest)]
                entry = _entry_of(place, model.origin)
                made_by = _maker_of(place, model.origin)
                written = export_model(
                    model,
                    opened,
                    target,
                    merged=merged,
                    signatures=signatures,
                    entry=entry,
                    made_by=made_by,
                )
        if as_json:
            print_json(written | {"folder": str(target)})
            return
        print(f"{model.label} → {target}")
        compared = "compared with the store" if merged is None else "of adapters merged into their model"
        print(f"digest {written['digest'][:12]}, {len(written['files'])} files {compared}")
        for folders in written.get("signatures", {}).values():
            _print_check(target, folders[0])
        if opened is not None:
            _print_use(target, uses_chat=opened.uses_chat)


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
    """Return the run that made the model, if the named run has reused it from the store."""
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
    """Return the option for a port other than the usual one, if that is taken."""
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
