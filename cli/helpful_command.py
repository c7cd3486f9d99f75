"""A command with helpful messages. For an unknown option, they name the command that has it, or the way to set a field
of the recipe; for a missing argument, they have its help."""

from typing import Any

import typer
from typer.core import TyperCommand


class HelpfulCommand(TyperCommand):
    """A command of Vantage."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the message about an unknown option names what was probably meant."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has its own copy of click, whose exceptions have no public name
            option = getattr(error, "option_name", None)
            if option is not None and hasattr(error, "possibilities") and (meant := _meant(ctx, option)):
                error.possibilities = None
                error.message = f"{getattr(error, 'message', '').rstrip('.')}. {meant}"  # type: ignore[attr-defined]
            elif type(error).__name__ == "MissingParameter" and (described := _described(error)):
                error.message = described  # type: ignore[attr-defined]
            raise


def _described(error: Exception) -> str:
    """Return the help of the missing argument; empty: there is none."""
    return getattr(getattr(error, "param", None), "help", None) or ""


def _meant(ctx: typer.Context, option: str) -> str:
    """Return the probable meaning of an option that this command does not have; empty: it is unknown."""
    name, own = option.lstrip("-").replace("-", "_"), ctx.command.params
    arguments = [
        str(getattr(each, "metavar", None) or each.name) for each in own if not each.opts[0].startswith("-")
    ]
    if any(name in argument.strip("[]").lower().split("|") for argument in arguments):
        return f"Write its value without {option}: {ctx.command_path} {' '.join(arguments)}."
    if any("--set" in each.opts for each in own):
        from vantage.schemas.recipe.recipe import Recipe

        if name in Recipe.model_fields:
            return f"A field of the recipe is set by --set {name}=VALUE."
    group = ctx.parent.command if ctx.parent is not None else None
    commands: dict[str, Any] = getattr(group, "commands", {})
    owners = [
        other for other, command in commands.items() if any(option in each.opts for each in command.params)
    ]
    return f"It is an option of {', '.join(f'`vantage {each}`' for each in owners)}." if owners else ""
