"""Test files from the formats' own projects, read by shmload and by each format's own library."""
