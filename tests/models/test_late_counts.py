"""Late values are returned in order, after the given number of calls, on every device."""

import pytest
import torch

from vantage.models.late_counts import LateReads, Unfinished


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_tensor_is_read_that_many_calls_later(late: int) -> None:
    reads = LateReads(late=late)
    found = [reads.after(torch.tensor(number)) for number in range(4)]
    assert [None if each is None else int(each) for each in found] == ([None] * late + [0, 1, 2, 3])[:4]
    assert [int(each) for each in iter(reads.next, None)] == [0, 1, 2, 3][4 - late :]


def test_what_is_read_is_what_was_there_at_the_call() -> None:
    reads, number = LateReads(late=1), torch.tensor(5)
    reads.after(number)
    number += 1
    read = reads.next()
    assert read is not None and int(read) == 5


def test_the_unfinished_rows_are_those_of_a_token_before() -> None:
    unfinished = Unfinished(3, late=1)
    active = torch.tensor([True, True, True])
    found = []
    for ended in (0, 2, 1):
        active[ended] = False
        found.append(unfinished.after(active))
    assert found == [3, 2, 1]
