"""Lets the tests here share what they have in common."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
