"""Named streams are apart: the same name and indices give the same numbers, any other gives others."""

import torch

from vantage.tasks.training.seeds import derive_seed, generator


def test_equal_names_give_equal_numbers_whatever_was_drawn_before() -> None:
    torch.manual_seed(0)
    first = torch.randn(3, generator=generator(5, "sampling", 2))
    torch.manual_seed(99)
    assert torch.equal(first, torch.randn(3, generator=generator(5, "sampling", 2)))


def test_streams_seeds_and_indices_never_meet() -> None:
    seeds = {
        derive_seed(seed, stream, *indices)
        for seed in range(20)
        for stream in ("init", "order", "sampling")
        for indices in ((), (0,), (1,), (0, 1), (1, 0), (10,))
    }
    assert len(seeds) == 20 * 3 * 6
    assert all(0 <= seed < 2**63 for seed in seeds)
