"""Files of columns, read through their own libraries: Parquet, HDF5, Zarr, safetensors."""
