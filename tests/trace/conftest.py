"""Lets the tests here, and the processes they spawn, import their datasets."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
