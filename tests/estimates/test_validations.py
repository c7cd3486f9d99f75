"""The number of validations of a policy equals that of a count one iteration after the other."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.estimates.workload_parts import validations


@pytest.mark.parametrize(
    ("iterations", "first", "second"), list(product((1, 6, 7, 24), (1, 2, 4, 10), (None, 1, 3, 4)))
)
def test_measurements_are_counted_once(iterations: int, first: int, second: int | None) -> None:
    every = (first,) if second is None else (first, second)
    work: Any = SimpleNamespace(iterations=iterations, validations=every)
    due = [i for i in range(1, iterations + 1) if i == iterations or any(i % each == 0 for each in every)]
    assert validations(work) == len(due)
