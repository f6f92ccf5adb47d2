"""Cut samples into batches whose padded size stays within a budget."""

from libc.stdint cimport int64_t


def cut(const int64_t[::1] lengths, int64_t budget, int64_t max_rows, int64_t[::1] starts):
    """Cut consecutive samples into batches: each takes samples while rows * longest <= budget and rows <= max_rows.

    A sample longer than the budget is a batch of its own. Each sample is examined once, so neighbors should have similar lengths.

    Args:
        lengths: lengths of the samples in their order; none above 2^31, and 0 counts as 1.
        starts: output: first sample of each batch; at most as many as there are samples.
    Returns:
        the number of batches.
    """
    cdef Py_ssize_t i, first = 0, num_batches = 0
    cdef int64_t longest = 1, length
    if starts.shape[0] < lengths.shape[0]:
        raise ValueError(f"starts must have {lengths.shape[0]} elements, got {starts.shape[0]}")
    with nogil:
        for i in range(lengths.shape[0]):
            length = lengths[i]
            if i > first and (i - first == max_rows or (i - first + 1) * (length if length > longest else longest) > budget):
                first = i
                longest = 1
            if i == first:
                starts[num_batches] = i
                num_batches += 1
            if length > longest:
                longest = length
    return num_batches
