"""Packing a dataset into shards on a store: encoding samples, writing shards, and continuing an interrupted packing.

One table defines which members a sample becomes (members.py); the members with their tar headers are the sample's *record*. Worker
processes encode records (encoded_samples.py; for iterables, stream_encoding.py), and the packing process appends them to shards and
computes checksums (shard_packing.py). dataset_packing.py packs map-style datasets, and stream_packing.py iterables. The store keeps
a claim, a note beside each complete shard, and finally the manifest. The part of the folder that one packing writes, its
*generation* (generation.py), is named by a hash of the dataset and the arguments, so one listing finds what is left to do.
"""
