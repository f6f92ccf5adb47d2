"""The crew: processes that fill slots, and their supervision."""
