"""Lets tests import what several of them share by its bare name: there are no packages under tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
