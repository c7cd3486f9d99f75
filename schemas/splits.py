"""The held-out shares of prompts: one pair for all datasets of a recipe."""

from collections.abc import Mapping

from vantage.schemas.problems import Problem
from vantage.schemas.recipe.inputs import Data, Mixture, Shares, Split
from vantage.schemas.recipe.recipe import Recipe

HELD_OUT = ("validation", "test")


def shares_of(recipe: Recipe) -> Shares:
    """Return the held-out shares: those that a dataset gives, else the defaults."""
    return Shares(
        **{side: share for side in HELD_OUT for share in list(_named(recipe.data, side).values())[:1]}
    )


def is_only_dataset(recipe: Recipe, name: str) -> bool:
    """Return whether the dataset gives a number of rows and is the only one beside test sets; then the number may exceed its share."""
    split = recipe.data[name].split
    is_only = all(data.is_test_set for other, data in recipe.data.items() if other != name)
    return is_only and (isinstance(split.validation, int) or isinstance(split.test, int))


def asked_test_rows(
    data: Mapping[str, Data], mixtures: Mapping[str, Mixture], name: str
) -> int | float | str | None:
    """Return the test setting of a dataset or a mixture: a number, a share, ``all``, or None."""
    if name in mixtures:
        return mixtures[name].split.test
    return data[name].split.test if name in data else None


def with_shares(recipe: Recipe) -> Recipe:
    """Return the recipe with default shares filled in."""
    shares = shares_of(recipe)
    data = {
        name: each
        if each.is_test_set
        else each.model_copy(
            update={
                "split": Split(
                    validation=shares.validation if each.split.validation is None else each.split.validation,
                    test=shares.test if each.split.test is None else each.split.test,
                )
            }
        )
        for name, each in recipe.data.items()
    }
    return recipe.model_copy(update={"data": data})


def share_problems(recipe: Recipe) -> list[Problem]:
    """Return problems of shares that differ between datasets, or that leave nothing to train on.

    With different shares, one dataset would train on prompts that another holds out.
    """
    problems = []
    for side in HELD_OUT:
        named = _named(recipe.data, side)
        first, share = next(iter(named.items()), ("", 0.0))
        for name, other in named.items():
            if other != share:
                message = f"{other:g} is not the {side} share of data.{first} ({share:g}); prompts that one holds out"
                remedy = "use one share in all, or a number of rows, which is taken from it"
                problems.append(
                    Problem(("data", name, "split", side), f"{message} would train the other", remedy)
                )
    shares = {
        side: list(_named(recipe.data, side).values())[:1] or [Shares.model_fields[side].default]
        for side in HELD_OUT
    }
    total = sum(share for [share] in shares.values())
    if total >= 1.0 and not problems:
        shown = " and ".join(f"{side} {share:g}" for side, [share] in shares.items())
        message = f"the shares of all datasets ({shown}) leave nothing to train on"
        problems.append(Problem(("data",), message, "use shares that add up to less than 1"))
    return problems


def _named(data: Mapping[str, Data], side: str) -> dict[str, float]:
    """Return dataset → the share that it names for the side."""
    sizes = {name: getattr(each.split, side) for name, each in data.items()}
    return {name: size for name, size in sizes.items() if isinstance(size, float)}
