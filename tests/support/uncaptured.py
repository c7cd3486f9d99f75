"""Run a step where a GPU would replay a CUDA graph of it."""

from vantage.models.cuda_graphs import Step


class Uncaptured:
    """A ``Capture`` that calls the step itself: the same code without a GPU."""

    def __call__(self, step: Step, *, restore: Step) -> Step:
        """Run the step once, as a capture does, undo it, and return the step itself."""
        step()
        restore()
        return step

    def end_all(self) -> None:
        """End no graph, since there is none."""
