"""Measure the rates of one thread of this machine's CPU, in a separate process whose libraries use one thread.

Time is CPU time of the thread, so that other programs on the machine do not count.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

ROWS = 1024
ELEMENTS = 2**21
"""Numbers of 4 bytes each: 8 MiB, about a tensor of a small model's minibatch."""
SECONDS = 0.06
"""Seconds that each of the two measurements takes."""


def main(width: int) -> None:
    """Print FLOP/s of matrix products in float32, and bytes/s of an operation on each element.

    The products are those of a layer: (ROWS, width) · (width, width), and the (width, ROWS) · (ROWS, width) of the
    gradient of its matrix.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    left, right = (generator.random(size, dtype=np.float32) for size in ((ROWS, width), (width, width)))
    product, gradient = np.empty_like(left), np.empty_like(right)
    source = np.ones(ELEMENTS, dtype=np.float32)
    target = np.ones_like(source)

    def multiply() -> None:
        np.matmul(left, right, out=product)
        np.matmul(left.T, product, out=gradient)

    def scale() -> None:
        np.multiply(source, target, out=target)

    flops = 2 * 2.0 * ROWS * width * width / typical(multiply)
    print(json.dumps({"flops": flops, "bandwidth": 3.0 * source.nbytes / typical(scale)}))


def typical(work: Callable[[], None]) -> float:
    """Return the median seconds of the calls that fit into ``SECONDS``, after one for warming up.

    It is not the minimum, since a stage shares caches and cores with other programs of the machine, too.
    """
    work()
    seconds: list[float] = []
    while sum(seconds) < SECONDS:
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]))
