"""WebDataset shards: samples in tar files."""
