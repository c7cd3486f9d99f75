"""`vantage.algorithms.advantages.gae` against a masked loop over time-major numpy arrays, on one thread.

    python -m benchmarks.gae [--rows 1024] [--tokens 2048] [--repeats 7]

Alternating runs in one process; the loop's transposing there and back is timed with it.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vantage.algorithms.advantages import gae

GAMMA, LAMBDA = 0.97, 0.95


def numpy_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return generalised advantage estimates computed by numpy, (B,T)."""
    of_time = [np.ascontiguousarray(each.numpy().T) for each in (rewards, values, mask)]
    rewards_t, values_t, valid = of_time
    found = np.zeros_like(rewards_t)
    after, advantage = (np.zeros(rewards_t.shape[1], np.float32) for _ in range(2))
    gamma, decay = np.float32(GAMMA), np.float32(GAMMA * LAMBDA)
    for t in reversed(range(len(rewards_t))):
        delta = rewards_t[t] + gamma * after - values_t[t]
        advantage = np.where(valid[t], delta + decay * advantage, advantage)
        after = np.where(valid[t], values_t[t], after)
        found[t] = np.where(valid[t], advantage, np.float32(0))
    return torch.from_numpy(np.ascontiguousarray(found.T))


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    shape = (options.rows, options.tokens)
    lengths = torch.randint(1, options.tokens + 1, (options.rows, 1), generator=draw)
    mask = torch.arange(options.tokens)[None] < lengths
    rewards, values = torch.randn(shape, generator=draw) * mask, torch.randn(shape, generator=draw)
    ways: dict[str, Callable[[], Tensor]] = {
        "gae": lambda: gae(rewards, values, mask, gamma=GAMMA, lam=LAMBDA),
        "numpy": lambda: numpy_gae(rewards, values, mask),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, Tensor] = {}
    for _ in range(options.repeats):
        for way, function in ways.items():
            start = time.perf_counter()
            found[way] = function()
            seconds[way].append(time.perf_counter() - start)
    torch.testing.assert_close(found["gae"], found["numpy"], rtol=1e-3, atol=1e-3)
    ratios = [ours / peer for ours, peer in zip(seconds["gae"], seconds["numpy"], strict=True)]
    shown = ", ".join(f"{way} {1e3 * statistics.median(each):.1f} ms" for way, each in seconds.items())
    print(
        f"{shape}: {shown}; {statistics.median(ratios):.2f} of the loop ({min(ratios):.2f}–{max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
