"""Puts packing_kit on the path, for workers of every start method too."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
