"""Write the reference of all commands, and of exit codes, from the command line's own parser."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import typer.main
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from vantage.attempts import exit_codes
from vantage.attempts.exit_codes import MEANINGS, ExitCode
from vantage.cli.app import app
from vantage.cli.main import GROUPS

COMMANDS_PAGE = "reference/commands.md"
EXIT_CODES_PAGE = "reference/exit_codes.md"


def pages() -> dict[str, str]:
    """Return path in the site → text of the two pages."""
    return {
        COMMANDS_PAGE: "\n".join(_commands_page()) + "\n",
        EXIT_CODES_PAGE: "\n".join(_exit_codes_page()) + "\n",
    }


@cache
def parser() -> TyperGroup:
    """Return the command line's parser, with all commands."""
    found = typer.main.get_command(app)
    assert isinstance(found, TyperGroup)
    return found


def _commands_page() -> Iterator[str]:
    yield from (
        "# Commands",
        "",
        "All commands with their arguments and options, as `vantage COMMAND --help` prints them. A name of a run, stage or model means the",
        "same to every command ([Names](../names.md)). [Exit codes](exit_codes.md) are the same for all commands.",
    )
    root = parser()
    groups = {heading: [command.__name__ for command in commands] for heading, commands in GROUPS.items()}
    groups["Run a recipe"].append("data")
    groups["Prove"].append("keys")
    for heading, names in groups.items():
        yield from ("", f"## {heading}")
        for name in names:
            yield from _command(_known(root, name), f"vantage {name}")


def _command(command: TyperGroup | TyperCommand, path: str) -> Iterator[str]:
    yield from ("", f"### {path}", "", _text(command.help or ""))
    if isinstance(command, TyperGroup):
        for name in command.commands:
            yield from _command(_known(command, name), f"{path} {name}")
        return
    arguments = [each for each in command.params if isinstance(each, TyperArgument)]
    usage = " ".join(_usage(each) for each in arguments)
    yield from ("", "```text", f"{path} [OPTIONS] {usage}".rstrip(), "```", "")
    yield from ("| argument or option | meaning | default |", "|---|---|---|")
    for parameter in command.params:
        assert isinstance(parameter, TyperArgument | TyperOption)
        if not parameter.hidden:
            yield f"| `{_name(parameter)}` | {_text(getattr(parameter, 'help', None) or '')} | {_default(parameter)} |"


def _known(group: TyperGroup, name: str) -> TyperGroup | TyperCommand:
    """Return a command of the group."""
    found = group.commands[name]
    assert isinstance(found, TyperGroup | TyperCommand)
    return found


def _usage(argument: TyperArgument) -> str:
    name = _name(argument)
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _name(parameter: TyperArgument | TyperOption) -> str:
    if isinstance(parameter, TyperArgument):
        return str(parameter.metavar or parameter.name or "").upper()
    names = ", ".join(parameter.opts)
    is_flag = getattr(parameter, "is_flag", False)
    metavar = "" if is_flag else f" {parameter.metavar or 'VALUE'}"
    return f"{names}{metavar}"


def _default(parameter: TyperArgument | TyperOption) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, False, (), []) or callable(parameter.default):
        return "–"
    return f"`{parameter.default}`"


def _text(text: str) -> str:
    return " ".join(text.split("\f")[0].split()).replace("|", "\\|")


def _exit_codes_page() -> Iterator[str]:
    yield from (
        "# Exit codes",
        "",
        "Every command ends with one of these codes; a stage's process does so, too.",
        "",
        "| code | name | meaning | when |",
        "|---|---|---|---|",
    )
    reasons = _docstrings()
    for code in ExitCode:
        yield f"| {int(code)} | `{code.name}` | {MEANINGS[code]} | {_text(reasons.get(code.name, 'All was done.')).replace('``', '`')} |"


def _docstrings() -> dict[str, str]:
    """Return name → the text under it in the class of exit codes."""
    [body] = [
        each.body
        for each in ast.parse(inspect.getsource(exit_codes)).body
        if isinstance(each, ast.ClassDef) and each.name == "ExitCode"
    ]
    found = {}
    for member, below in pairwise(body):
        match member, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found
