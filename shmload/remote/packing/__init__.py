"""Packing a dataset into shards on a store: what samples become, the shards, and what is kept for a packing that is killed."""
