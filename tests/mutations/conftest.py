"""Lets the test import the script beside it: there are no packages under tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
