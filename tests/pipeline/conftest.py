"""Lets the tests here, and the workers they start, import their helpers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
