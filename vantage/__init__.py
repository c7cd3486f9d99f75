"""Declarative RLHF pipelines: one recipe from demonstrations to an audited policy.

``vantage.run``, ``plan``, ``audit``, ``open_run`` and ``load_policy`` do in Python what the commands do (docs/python.md).

The packages lie at the top of the repository; links make them ``vantage.schemas``, ``vantage.models`` and so on, so that no name of
ours can meet a user's ``models.py``. Every process of ours executes this file first: it imports nothing before it is asked.
"""

import sys as _sys

# Remove the folder of packages from the path: from there they would be imported under their bare names.
_sys.path[:] = [entry for entry in _sys.path if entry not in __path__]

_HOME = {
    "Audit": "auditing",
    "audit": "auditing",
    "Plan": "planning",
    "plan": "planning",
    "Policy": "policies",
    "load_policy": "policies",
    "Run": "records",
    "Stage": "records",
    "open_run": "records",
    "RunFailed": "running",
    "run": "running",
}
"""Name → its module in ``vantage.api``; ``__init__.pyi`` has their types."""

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import a name of the Python interface when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'vantage' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"vantage.api.{_HOME[name]}"), name)
