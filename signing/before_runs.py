"""Check signing before anything is trained: the recipe's key, and the policy on publishing."""

from collections.abc import Iterator

from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.recipe import ResolvedRecipe


def check_signing(recipe: ResolvedRecipe, workspace: Workspace) -> None:
    """Refuse a key that cannot sign, and a policy that cannot be read.

    Raises:
        vantage.signing.keys.BadKey: the key of ``sign:`` cannot sign.
        vantage.signing.keys.MissingPackages: the recipe has ``sign:``, and the packages for signing are not installed.
        vantage.signing.policy.BadPolicy: the recipe publishes under an alias, and the policy cannot be read.
    """
    if recipe.sign is not None:
        from vantage.signing.keys import key_of

        key_of(recipe)
    if any(publication.alias is not None for publication in recipe.publish):
        from vantage.signing.policy import read_policy

        read_policy(workspace)


def signing_warnings(recipe: ResolvedRecipe, workspace: Workspace) -> list[str]:
    """Return warnings about aliases that the policy on publishing would not move for this recipe.

    Raises:
        vantage.signing.keys.BadKey, vantage.signing.policy.BadPolicy: as ``check_signing``, which is called first.
    """
    return list(_held_back(recipe, workspace))


def _held_back(recipe: ResolvedRecipe, workspace: Workspace) -> Iterator[str]:
    named = [(each.registered_model, each.alias) for each in recipe.publish if each.alias is not None]
    if not named:
        return
    from vantage.signing.keys import key_of
    from vantage.signing.policy import keys_of, present_user, read_policy

    policy = read_policy(workspace)
    if policy is None:
        return
    key = key_of(recipe)
    signs_with = None if key is None else key.public.key_id
    for model, alias in named:
        for path, rule in policy.rules.rules_for(model, alias):
            held = f"{model}@{alias}: {policy.name}, {path}"
            missing = [each.short for each in keys_of(rule, policy.folder) if each.key_id != signs_with]
            if missing:
                yield (
                    f"{held} asks for signatures by key {', '.join(missing)}, with which this recipe does not sign; the alias "
                    "stays where it is until somebody has signed with it (`vantage sign`)"
                )
            if rule.users is not None and (user := present_user()) not in rule.users:
                yield f"{held} does not let {user} move it, so the alias stays where it is"
