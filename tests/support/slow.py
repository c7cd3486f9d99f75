"""Mark cases of a parametrized test that run in the slow tier only, beside others that run each time."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Mark the cases, which are a value each, or a tuple of values for several names."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
