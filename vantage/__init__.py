"""Declarative RLHF pipelines: one recipe from demonstrations to an audited policy.

The packages lie at the top of the repository; links make them ``vantage.schemas``, ``vantage.models`` and so on, so that no name of
ours can meet a user's ``models.py``. Every process of ours executes this file first: it imports nothing.
"""

import sys as _sys

# A folder of packages is no place to import from: there they would be found under their bare names.
_sys.path[:] = [entry for entry in _sys.path if entry not in __path__]
