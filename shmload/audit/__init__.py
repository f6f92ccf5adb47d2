"""The audit: a record of what each rank was delivered, and the proof that every sample came exactly once.

Each iterator passes order and batch to the loader's `Recorder` right before it yields the batch. The recorder keeps the order
(`last_indices`) and, with an audit, appends one line of JSON: place, indices, what was done about bad samples, and XXH64 of the
content (src/digest.pyx). `shmload verify` reads these files (`shmload/tools/audit`).

Rejected: pickle in the digest (depends on the identity of objects); CRC-32 (32 bits collide after about 65,000 batches); buffered
records (a kill loses the last ones).
"""
