"""Capture a step as a CUDA graph, which a GPU replays without Python launching each kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

Step = Callable[[], None]


class Capture(Protocol):
    """Function from a step to another one with the same effect."""

    def __call__(self, step: Step, *, restore: Step) -> Step:
        """Return a function with the same effect as ``step``.

        Args:
            restore: function that undoes the changes of a step; a capture may run some steps before it captures one.
        """

    def end_all(self) -> None:
        """Wait until all replays are done; afterwards all captured steps must be dropped before another one is captured."""


class CudaGraphs:
    """Captures steps of one device, which are never replayed at the same time and share their memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step, *, restore: Step) -> Step:
        """See ``Capture``.

        Raises:
            Exception: the step has an operation that cannot be captured, or memory is short; nothing is captured then.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # run the step once, so that kernels are loaded and libraries allocate their workspace on this stream
            step()
            restore()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has its own memory and cannot use cached blocks
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _spare_generator():
            # other threads, such as NCCL's, call CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except Exception:
                with suppress(RuntimeError):  # a second error, with less information than the first
                    graph.capture_end()
                raise
            graph.capture_end()

        # the argument keeps the tensors alive that the graph reads and writes
        def replay(held: Step = step) -> None:
            graph.replay()

        return replay

    def end_all(self) -> None:
        """See ``Capture``."""
        torch.cuda.synchronize()
        # Torch frees a pool with its last graph, and refuses to capture into it again
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _spare_generator() -> Iterator[None]:
    """Give the device's generator another state inside the block.

    A capture registers the generator, though a step draws no random number from it, and a failed capture does not
    release it.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)
