"""Rules that say whether a response is right, by the name that a recipe gives them."""

from collections.abc import Callable
from functools import partial

from tasks import arithmetic

Verifier = Callable[[str, str], bool]
"""(prompt, response) → right or wrong."""

VERIFIERS: dict[str, Verifier] = {
    name: partial(arithmetic.verify, dial=dial) for name, dial in arithmetic.DIALS.items()
}
