"""Shards on an object store: packing a dataset into them, and reading it back."""
