"""The peak memory of a process is the most that it held."""

import pytest
import torch

from vantage.tasks.training.step_metrics import peak_memory


@pytest.mark.slow
def test_the_peak_of_a_process_is_what_it_held_at_most() -> None:
    before = peak_memory()
    assert 50e6 < before < 100e9, "bytes: torch alone takes more than 50 MB"
    more = int(before) + 200_000_000
    held = torch.ones(more // 4)  # written, so that it is in memory
    assert more < peak_memory() < 2 * more + 1e9
    del held
    assert peak_memory() > more, "it does not fall"
