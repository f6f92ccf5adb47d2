"""Arrays: .npy files, maps of files and memory, whose first axis counts samples."""
