"""Packing a dataset into shards on a store: encoding samples, writing shards, and continuing an interrupted packing.

A sample becomes members of a record by one table (encoding.py). Workers encode (encoded_samples.py), and the trainer cuts, sums
and writes (pack.py). The samples of an iterable are cut into shards by the same code, but encoded by the trainer
(stream_encoding.py). The store keeps a claim, a note beside each complete shard, and finally the manifest. A generation
(generation.py) is named after the dataset and the arguments, so continuing takes one listing.
"""
