"""``vantage schema``: print the JSON schema of recipes and sweeps."""

from typing import Annotated

import typer

from vantage.cli.output import print_json


def schema(
    of_sweep: Annotated[bool, typer.Option("--sweep", help="Print the schema of a sweep instead.")] = False,
) -> None:
    """Print the JSON schema of a recipe, for editors."""
    from vantage.schemas.loading.json_schema import recipe_schema, sweep_schema

    print_json(sweep_schema() if of_sweep else recipe_schema(), indent=2)
