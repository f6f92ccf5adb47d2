"""Makes hf_kit importable from these tests and the processes they spawn, and keeps datasets off the network."""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
