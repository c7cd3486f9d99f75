"""The most memory that a process held since a moment, as Linux counts it."""

from pathlib import Path


class PeakMemory:
    """Measures this process from the moment at which the object is made. Only one may be in use at a time."""

    def __init__(self) -> None:
        """Begin to measure: what the process holds now does not count."""
        Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
        self._before = _status("VmRSS")

    @property
    def bytes(self) -> int:
        """The most bytes that the process held since then, above what it held at the beginning."""
        return _status("VmHWM") - self._before


def use_libraries() -> None:
    """Load the code, thread pools and first blocks of the allocator that any stage loads, so that they do not count."""
    import torch
    from transformers import LlamaForCausalLM

    from vantage.models.builtin import builtin_config

    model = LlamaForCausalLM(builtin_config("tiny"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    optimizer.step()


def _status(field: str) -> int:
    """Return the bytes that a field of /proc/self/status names."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
