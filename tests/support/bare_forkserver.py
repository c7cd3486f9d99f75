"""Load ``vantage.attempts.launchers.forkserver`` without the libraries of stages, which take five CPU seconds and which
fake stages do not need.

Only multiprocessing's fork server imports this module (``bare_preload``).
"""

import importlib
from types import ModuleType

LEFT_OUT = ("torch", "safetensors", "transformers", "vantage.tasks", "vantage.schemas.tables")

_import = importlib.import_module


def _import_others(name: str, package: str | None = None) -> ModuleType:
    if name.startswith(LEFT_OUT):
        raise ImportError(f"{name} is not preloaded for fake stages")
    return _import(name, package)


importlib.import_module = _import_others
import vantage.attempts.launchers.forkserver  # noqa: E402, F401

importlib.import_module = _import
