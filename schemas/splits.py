"""The shares of prompts that are held out: one pair for all datasets of a recipe."""

from schemas.problems import Problem
from schemas.recipe.inputs import Shares, Split
from schemas.recipe.recipe import Recipe

HELD_OUT = ("validation", "test")


def shares_of(recipe: Recipe) -> Shares:
    """The share of all prompts on each held-out side: the one that a dataset names, else the default."""
    return Shares(**{side: share for side in HELD_OUT for share in list(_named(recipe, side).values())[:1]})


def is_only_dataset(recipe: Recipe, name: str) -> bool:
    """Whether a dataset that asks for a number of rows has no other to agree with, and may reach beyond its share."""
    split = recipe.data[name].split
    return len(recipe.data) == 1 and (isinstance(split.validation, int) or isinstance(split.test, int))


def with_shares(recipe: Recipe) -> Recipe:
    """The recipe with the shares written out where a dataset leaves them open."""
    shares = shares_of(recipe)
    data = {
        name: each.model_copy(
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
    """Datasets that disagree on what is held out, or that together leave nothing to train on.

    Were the shares to differ, one dataset would train on prompts that another holds out.
    """
    problems = []
    for side in HELD_OUT:
        named = _named(recipe, side)
        first, share = next(iter(named.items()), ("", 0.0))
        for name, other in named.items():
            if other != share:
                message = f"{other:g} is not the {side} share of data.{first} ({share:g}); prompts that one holds out"
                remedy = "use one share in all, or a number of rows, which is taken from it"
                problems.append(
                    Problem(("data", name, "split", side), f"{message} would train the other", remedy)
                )
    shares = {
        side: list(_named(recipe, side).values())[:1] or [Shares.model_fields[side].default]
        for side in HELD_OUT
    }
    total = sum(share for [share] in shares.values())
    if total >= 1.0 and not problems:
        told = " and ".join(f"{side} {share:g}" for side, [share] in shares.items())
        message = f"the shares of all datasets ({told}) leave nothing to train on"
        problems.append(Problem(("data",), message, "use shares that add up to less than 1"))
    return problems


def _named(recipe: Recipe, side: str) -> dict[str, float]:
    """Dataset → the share that it names for the side."""
    sizes = {name: getattr(data.split, side) for name, data in recipe.data.items()}
    return {name: size for name, size in sizes.items() if isinstance(size, float)}
