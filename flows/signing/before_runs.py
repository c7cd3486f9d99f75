"""What is checked about signatures before anything is trained: the recipe's key, and the policy on publishing."""

from flows.runs.workspace import Workspace
from schemas.recipe.recipe import ResolvedRecipe


def check_signing(recipe: ResolvedRecipe, workspace: Workspace) -> None:
    """Refuse a key that cannot sign, and a policy that cannot be read.

    Raises:
        flows.signing.keys.BadKey: of ``sign:``.
        flows.signing.keys.MissingPackages: ``sign:`` is there, and what signs is not installed.
        flows.signing.policy.BadPolicy: the recipe publishes under an alias.
    """
    if recipe.sign is not None:
        from flows.signing.keys import key_of

        key_of(recipe)
    if any(publication.alias is not None for publication in recipe.publish):
        from flows.signing.policy import read_policy

        read_policy(workspace)
