"""Packing a dataset into shards on a store: encoding samples, writing shards, and continuing an interrupted packing."""
