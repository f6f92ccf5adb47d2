"""What is in files: formats known by their bytes, and what there is to say of each."""
