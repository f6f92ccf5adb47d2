"""Parquet: `ParquetDataset` reads local files, and the format `Parquet` is for `RemoteDataset` and `shmload inspect`."""
