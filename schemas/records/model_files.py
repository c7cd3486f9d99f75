"""The folders with the files of a model."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelFiles:
    """The folder of a model and, if it holds adapters (LoRA), the folder of their base model."""

    folder: Path
    base: Path | None = None
