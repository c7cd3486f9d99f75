"""Aliases of registered models that MLflow keeps for itself."""

import re

RESERVED_ALIAS = re.compile(r"latest|v[0-9]+")
"""MLflow would register nothing under them. A recipe with one is refused when it is loaded; the record of an earlier run may
have one."""
