"""WebDataset shards: samples in tar files.

All headers of a mapped shard are read once, without the GIL, into columns (payload offset, size, extension; first member and key of
each sample). The columns are kept next to the shard, and every process maps them. A batch is read by a lookup of its members for
each field (src/tar_rows.pyx) and one native copy loop, which stops at the first row that it cannot copy. Python converts that row,
or raises the error that names file, sample and offset. Streams use the same state machine for headers, block by block.
"""
