"""``vantage keys``: keys for signatures."""

import os
from pathlib import Path
from typing import Annotated

import typer

from vantage.cli.app import AsJson, Verbose
from vantage.cli.helpful_command import HelpfulCommand
from vantage.cli.output import explained, print_json

keys_app = typer.Typer(no_args_is_help=True, help="Make and look at keys for signatures.")


@keys_app.command("new", cls=HelpfulCommand)
def new(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Write the private key to FILE, and the public one to FILE.pub."),
    ],
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Make a private key (readable by you alone) and its public key. VANTAGE_KEY_PASSWORD, if set, encrypts it."""
    with explained(verbose):
        from vantage.signing.keys import PASSWORD, new_key, path_of

        made = new_key(path_of(file))
        public = f"{made.path}.pub"
        if as_json:
            print_json(
                {
                    "key_id": made.public.key_id,
                    "private": str(made.path),
                    "public": public,
                    "encrypted": made.password is not None,
                }
            )
            return
        how = "encrypted" if made.password is not None else f"not encrypted; {PASSWORD} was not set"
        print(f"private key  {made.path}  (mode 0600, {how})")
        print(f"public key   {public}  (for everyone who checks)")
        print(f"key id       {made.public.key_id}")
        print(f"in a recipe  sign: {{key: {os.path.abspath(made.path)}}}")


@keys_app.command("show", cls=HelpfulCommand)
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A private or a public key.")],
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show the id of a key, and whether it is private or public; never the key itself."""
    with explained(verbose):
        from vantage.signing.keys import described, path_of

        facts = described(path_of(file))
        if as_json:
            print_json(facts)
            return
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):<10}  {value}")
