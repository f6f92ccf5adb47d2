"""Files that the formats' own projects test themselves with, read by shmload and by the formats' own libraries."""
