"""``vantage sign``: sign a model and everything that it was made from."""

from pathlib import Path
from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at


def sign(
    named: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/STAGE]|MODEL",
            help="A run (all that it has made), a stage of it (with all that it was made from), or a registered model of "
            "MLflow that a run of this workspace made: NAME, NAME@ALIAS, NAME/VERSION.",
            autocompletion=complete_run,
        ),
    ],
    key: Annotated[
        Path,
        typer.Option("--key", metavar="FILE", help="A private key; its password is in VANTAGE_KEY_PASSWORD."),
    ],
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Read every byte of a model and of all that it was made from, compare it with its digests, and sign it.

    What people decided about it (answers, loosened gates, aliases that they moved) is signed as it is recorded.
    """
    with explained(verbose):
        from vantage.signing.keys import path_of, signing_key
        from vantage.signing.signing import sign_all
        from vantage.signing.signing_decisions import sign_decisions_of
        from vantage.signing.targets import find_target

        place = workspace_at(workspace)
        loaded = signing_key(path_of(key))
        target = find_target(place, named)
        signed = sign_all(place, target.record, target.steps, loaded)
        num_decisions = sign_decisions_of(place, target.record, target.steps, loaded)
        if as_json:
            print_json(
                {
                    "run_id": target.record.run_id,
                    "key_id": loaded.public.key_id,
                    "artifacts": [
                        {
                            "step": each.step,
                            "digest": each.digest,
                            "new": each.is_new,
                            "statements": each.place,
                        }
                        for each in signed
                    ],
                    "new_decisions": num_decisions,
                }
            )
            return
        width = max(len(each.step) for each in signed)
        for each in signed:
            print(
                f"{each.step:<{width}}  {each.digest[:12]}  {'signed' if each.is_new else 'was signed already'}"
            )
        new = sum(each.is_new for each in signed)
        print(
            f"run {target.record.run_id}: {new} signed, {len(signed) - new} signed before, by key {loaded.public.key_id}"
        )
        if num_decisions:
            print(f"decisions of people about them: {num_decisions} signed")
        print(
            f"statements and signatures: {signed[-1].place.rsplit('/', 2)[0]}"
        )  # PLACE/<stage key>/<key id>
