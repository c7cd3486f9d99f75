"""``builtin:regex``: does the response match an expression of RE2?

The time is linear in the response, so there is no time limit. An empty response is right if the expression matches it.
"""

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, RegexVerifier
from vantage.tasks.rewards.builtin.expressions import compiled, matches
from vantage.tasks.rewards.builtin.judge import Judge


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the match. Raises ValueError if RE2 does not accept the expression."""
    assert isinstance(verifier, RegexVerifier)
    expression = compiled(verifier.pattern, field="pattern")
    return lambda response, _: matches(expression, response, whole=verifier.whole)
