"""Parquet: `ParquetDataset` for local files, the layout `Parquet` for objects on a store."""
