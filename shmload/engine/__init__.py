"""Finding the number of workers and of batches ordered ahead while the loader runs, without changing a batch."""
