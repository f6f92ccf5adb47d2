"""WebDataset shards: samples in tar files.

* `TarDataset` (tar_dataset.py) reads local shards by index, `TarStream` (stream.py) reads local shards in order, `TarWriter`
  (writer.py) writes them, and `Tar` (tar_format.py) is the format for `RemoteDataset` and `shmload inspect`.
* shard_index.py: all headers of a mapped shard are read once, without the GIL, into columns (payload offset, size, extension; first
  member and key of each sample). The columns are kept next to the shard, and every process maps them.
* tar_column.py: each field of a batch is read by a lookup of its members (src/tar_rows.pyx) and one native copy loop, which stops
  at the first row that it cannot copy. Python converts that row, or raises the error that names file, sample and offset.
* decoders.py and encoders.py: decode and encode single members by their extension (extensions.py). image_specs.py, tenbin.py,
  numpy_members.py and member_compression.py do the work for one kind of member each.

Streams use the same state machine for headers, block by block.
"""
