"""Check the models that a recipe publishes."""

from collections.abc import Iterator

from vantage.schemas.checks.partial_recipe import PartialRecipe
from vantage.schemas.checks.references import RecipeReferences, Wrong
from vantage.schemas.problems import Problem, quote
from vantage.schemas.reserved_aliases import RESERVED_ALIAS


def publication_problems(recipe: PartialRecipe, references: RecipeReferences) -> Iterator[Wrong]:
    """Yield problems of published stages and gates that do not exist, and of aliases that cannot be moved."""
    aliases: dict[tuple[str, str], int] = {}
    for i, (publication, named) in enumerate(zip(recipe.publish, references.publications, strict=True)):
        yield from (each.wrong for each in named if each.wrong is not None)
        model, alias = publication.registered_model, publication.alias
        if alias is not None and RESERVED_ALIAS.fullmatch(alias):
            message = f"{quote(alias)} is reserved by MLflow, which would not register the model under it"
            yield Problem(("publish", i, "alias"), message, "name another, such as champion")
        if model is not None and alias is not None:
            first = aliases.setdefault((model, alias), i)
            if first != i:
                message = f"publish.{first} moves the alias {quote(alias)} of {quote(model)} too"
                yield Problem(("publish", i, "alias"), message, "an alias points at one model; name another")
