"""Makes hf_kit importable from the tests of this folder, and from the processes they spawn; keeps datasets off the network."""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
