"""SharedIndex: a list of paths, labels or rows that exists once per machine.

Entries are packed into columns (packed_index.py) of shared memory (shared_bytes.py). An `IndexLayout` describes the columns. It is
small and is pickled; the memory is not, because other processes of the machine map it.
"""
