"""Lets the tests here, and the commands they start, import their datasets."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
