"""The worker pool: processes that fill slots, and their supervision."""
