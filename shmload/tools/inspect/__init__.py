"""What is in files: formats known by their bytes, and what there is to say of each. One file a format, in `formats/`."""
