"""Makes hf_kit importable from the tests of this folder, and from the processes they spawn; keeps datasets off the network."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
