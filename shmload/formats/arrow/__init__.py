"""Read rows from Arrow tables, which come from Parquet files, IPC files and Ray blocks, by the addresses of their bytes.

* arrow_reader.py opens files and returns validated tables.
* arrow_schema.py derives a dataset's schema from arrow's; arrow_types.py maps single types.
* arrow_column.py finds the address of each row of a column; arrow_groups.py joins the row groups of a batch and copies their rows.
* arrow_values.py converts single values to Python objects, for formats without a schema.
"""
