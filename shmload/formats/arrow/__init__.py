"""Arrow: tables of Parquet files, IPC files and Ray blocks as columns whose rows have addresses."""
