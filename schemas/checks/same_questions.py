"""Check that no two servers of a stage are asked equal questions at different addresses."""

from collections.abc import Iterator

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.problems import Path, Problem
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.served_scores import RewardServer, Served
from vantage.schemas.recipe.terms import row_of
from vantage.schemas.steps import rewards_read


def same_question_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each server whose questions another server of the same stage answers.

    A stage keeps an answer under its question, without the address. The second server would never be asked, and would get the
    scores of the first.
    """
    refused: set[Path] = set()
    for stage in recipe.stages.values():
        first: dict[str, tuple[Path, Served]] = {}
        for path, server in _servers(recipe, rewards_read(stage)):
            other_path, other = first.setdefault(canonical_json(server.question_fields()), (path, server))
            if _address(server) == _address(other) or path in refused:
                continue
            refused.add(path)
            message = (
                f"{server.url} is asked the same questions as {'.'.join(map(str, other_path))} ({other.url}), and answers are kept by "
                "their question, so that this server would get the other one's scores"
            )
            remedy = (
                "give this server another version"
                if isinstance(server, RewardServer)
                else "give both the same url, or change the question: another model, prompt or request"
            )
            yield Problem(path, message, remedy)


def _servers(recipe: Recipe, rewards: tuple[str, ...]) -> Iterator[tuple[Path, Served]]:
    """Yield each server of these rewards with the path of its address in the recipe."""
    for reward in rewards:
        for index, term in enumerate(recipe.rewards[reward].terms):
            if term.server is not None:
                yield ("rewards", reward, "terms", index, row_of(term).field, "url"), term.server


def _address(server: Served) -> str:
    """Return the part of an address that is compared. A path follows a judge's address, so a slash at its end is
    ignored."""
    return server.address("" if isinstance(server, RewardServer) else "/")
