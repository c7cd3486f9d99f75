"""Counts of passes include those of another thread that worked for this one."""

from concurrent.futures import ThreadPoolExecutor

import torch

from vantage.models.pass_counts import PassCounts, add_counts, count_pass, count_sampled, taken_counts


def test_counts_of_another_thread_are_added_to_what_was_counted_here() -> None:
    taken_counts()
    count_pass(10, torch.tensor(7))
    count_sampled(4, ended=1)

    def elsewhere() -> PassCounts:
        count_pass(6, torch.tensor(5))
        count_pass(6, torch.tensor(6))
        count_sampled(3, ended=2)
        return taken_counts()

    with ThreadPoolExecutor(1) as other:
        add_counts(other.submit(elsewhere).result())
    found = taken_counts()
    assert (found.passes, found.positions, int(found.tokens)) == (3, 22, 18)
    assert (found.sampled_rows, found.ended_rows) == (7, 3)
    assert taken_counts() == PassCounts(), "taken once"
