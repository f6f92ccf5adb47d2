"""Windows of tokens widened into a batch, and the plan that packs documents into windows. The loops run without the GIL.

A plan (formats/tokens.py) lists the pieces of documents in each window. Best-fit decreasing keeps the open windows in stacks by the
room left in them, with one bit for each amount of room that some window has, so the tightest fit is the next bit that is set.

Source: H. Ding et al., Fewer truncations improve language modeling, ICML 2024 (best-fit packing).
"""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

import numpy as np

cdef extern from *:
    """
    #define ask_for(at) __builtin_prefetch((at), 0, 3)
    """
    int __builtin_ctzll(uint64_t x) noexcept nogil
    void ask_for(const void *at) noexcept nogil

cdef enum:
    AHEAD = 4  # windows between prefetch and copy
    LINE = 64
    NBYTES_ASKED = 4096  # of a window; after these the processor prefetches by itself

ctypedef fused source_t:
    uint8_t
    int8_t
    uint16_t
    int16_t
    uint32_t
    int32_t
    int64_t


cdef void _widen(const source_t *tokens, void *to, bint is_long, size_t n) noexcept nogil:
    cdef size_t i
    cdef int64_t *longs = <int64_t *>to
    cdef int32_t *shorts = <int32_t *>to
    if is_long:
        for i in range(n):
            longs[i] = <int64_t>tokens[i]
    else:
        for i in range(n):
            shorts[i] = <int32_t>tokens[i]


cdef void _pad(void *to, int64_t value, bint is_long, size_t n) noexcept nogil:
    cdef size_t i
    if is_long:
        for i in range(n):
            (<int64_t *>to)[i] = value
    else:
        for i in range(n):
            (<int32_t *>to)[i] = <int32_t>value


cdef Py_ssize_t _last_begun(const int64_t[::1] begins, int64_t at) noexcept nogil:
    """Return the last file that begins at or before `at`, which is not empty; the last entry of `begins` is the end of all files.
    """
    cdef Py_ssize_t low = 0, high = begins.shape[0] - 1, middle
    while high - low > 1:
        middle = (low + high) // 2
        if begins[middle] <= at:
            low = middle
        else:
            high = middle
    return low


cdef class WindowReader:
    """A reader of windows of tokens.

    Tokens may be in several files, with one numbering for all; a window or a piece belongs to one file.

    Args:
        addresses: address of each file's first token.
        file_begins: number of each file's first token, and the number of all tokens.
        window_begins: number of each file's first window, and the number of all windows; not used with a plan.
        kind: numpy's letter and size of a token, such as "u2".
        window: tokens of a row.
        num_windows: number of rows.
        stride: tokens from one window of a file to the next, or 0 if a plan defines the windows.
        ends, starts, lengths: the plan: the end of each window's pieces, and each piece's first token and length.
        pad: the token that fills the rest of a window.
        is_long: write int64 instead of int32.
        keeper: an object that keeps the tokens mapped.
    """

    cdef const int64_t[::1] _addresses, _file_begins, _window_begins
    cdef int64_t _window, _stride, _pad_value
    cdef readonly int64_t num_windows
    cdef int _size
    cdef bint _is_signed, _is_long
    cdef const int64_t[::1] _ends, _starts
    cdef const int32_t[::1] _lengths
    cdef object _keeper

    def __cinit__(
        self, const int64_t[::1] addresses, const int64_t[::1] file_begins, const int64_t[::1] window_begins, str kind,
        int64_t window, int64_t num_windows, int64_t stride, const int64_t[::1] ends, const int64_t[::1] starts,
        const int32_t[::1] lengths, int64_t pad, bint is_long, keeper,
    ):
        self._addresses, self._file_begins, self._window_begins = addresses, file_begins, window_begins
        self._window, self._stride, self._pad_value = window, stride, pad
        self._ends, self._starts, self._lengths = ends, starts, lengths
        self.num_windows = num_windows
        self._size, self._is_signed, self._is_long = int(kind[1]), kind[0] == "i", is_long
        self._keeper = keeper

    def into(self, uintptr_t tokens, uintptr_t segments, uintptr_t positions, size_t nbytes, const int64_t[::1] indices):
        """Write windows to rows, and segment ids and positions (int32) if their addresses are not 0.

        Raises:
            IndexError: a window does not exist; nothing is written then.
        """
        cdef Py_ssize_t i, n = indices.shape[0]
        cdef int64_t at, bad = -1
        cdef size_t width = 8 if self._is_long else 4
        if nbytes != n * self._window * width:
            raise ValueError(f"the buffer of {nbytes} bytes does not have the size of {n} windows of {self._window} tokens")
        with nogil:
            for i in range(n):
                if indices[i] < -self.num_windows or indices[i] >= self.num_windows:
                    bad = i
                    break
            if bad < 0:
                for i in range(n):
                    if i + AHEAD < n and self._stride:
                        self._ask(indices[i + AHEAD])
                    at = indices[i]
                    self._fill(
                        at + self.num_windows if at < 0 else at,
                        <uint8_t *>tokens + i * self._window * width,
                        <int32_t *>segments + i * self._window if segments else NULL,
                        <int32_t *>positions + i * self._window if positions else NULL,
                    )
        if bad >= 0:
            raise IndexError(f"index {indices[bad]} is out of range for {self.num_windows} samples")

    def files_of(self, const int64_t[::1] indices):
        """Return the numbers of the files that contain windows. Windows that do not exist are left out."""
        cdef Py_ssize_t num_files = self._addresses.shape[0], file, i
        cdef int64_t at, piece
        if num_files == 1:
            return [0]
        found = set()
        for i in range(indices.shape[0]):
            at = indices[i] + self.num_windows if indices[i] < 0 else indices[i]
            if not 0 <= at < self.num_windows:
                continue
            if self._stride:
                found.add(_last_begun(self._window_begins, at))
                continue
            for piece in range(self._ends[at - 1] if at else 0, self._ends[at]):
                found.add(_last_begun(self._file_begins, self._starts[piece]))
        return sorted(found)

    cdef void _ask(self, int64_t at) noexcept nogil:
        """Prefetch a window that is copied soon: windows are anywhere in memory, and waiting for one costs more than widening it.
        """
        cdef const uint8_t *window = self._at_stride(at + self.num_windows if at < 0 else at)
        cdef int64_t line = 0, nbytes = min(self._window * self._size, <int64_t>NBYTES_ASKED)
        while line < nbytes:
            ask_for(window + line)
            line += LINE

    cdef void _fill(self, int64_t at, uint8_t *to, int32_t *segments, int32_t *positions) noexcept nogil:
        cdef int64_t piece, j, used = 0, segment = 0
        cdef int64_t length
        cdef size_t width = 8 if self._is_long else 4
        if self._stride:
            self._write(self._at_stride(at), to, self._window)
            return
        for piece in range(self._ends[at - 1] if at else 0, self._ends[at]):
            length = self._lengths[piece]
            self._write(self._token(self._starts[piece]), to + used * width, length)
            segment += 1
            if segments != NULL:
                for j in range(length):
                    segments[used + j] = <int32_t>segment
                    positions[used + j] = <int32_t>j
            used += length
        _pad(to + used * width, self._pad_value, self._is_long, self._window - used)
        if segments != NULL:
            for j in range(used, self._window):
                segments[j] = 0
                positions[j] = 0

    cdef const uint8_t *_at_stride(self, int64_t window) noexcept nogil:
        """Return the first token of a window placed by the stride."""
        cdef Py_ssize_t file = _last_begun(self._window_begins, window)
        return <const uint8_t *><uintptr_t>self._addresses[file] + (window - self._window_begins[file]) * self._stride * self._size

    cdef const uint8_t *_token(self, int64_t number) noexcept nogil:
        cdef Py_ssize_t file = _last_begun(self._file_begins, number)
        return <const uint8_t *><uintptr_t>self._addresses[file] + (number - self._file_begins[file]) * self._size

    cdef void _write(self, const uint8_t *at, void *to, size_t n) noexcept nogil:
        if self._size == 2:
            if self._is_signed:
                _widen(<const int16_t *>at, to, self._is_long, n)
            else:
                _widen(<const uint16_t *>at, to, self._is_long, n)
        elif self._size == 4:
            if self._is_signed:
                _widen(<const int32_t *>at, to, self._is_long, n)
            else:
                _widen(<const uint32_t *>at, to, self._is_long, n)
        elif self._size == 8:
            _widen(<const int64_t *>at, to, self._is_long, n)
        elif self._is_signed:
            _widen(<const int8_t *>at, to, self._is_long, n)
        else:
            _widen(<const uint8_t *>at, to, self._is_long, n)


def document_offsets(const source_t[::1] tokens, int64_t separator):
    """Return the offset of each document, and the number of tokens at the end; a separator belongs to the document that it ends."""
    cdef Py_ssize_t i, n = tokens.shape[0], k = 1
    cdef int64_t count = 0
    cdef bint has_tail
    with nogil:
        for i in range(n):
            count += <int64_t>tokens[i] == separator
    has_tail = n > 0 and <int64_t>tokens[n - 1] != separator
    made = np.zeros(count + has_tail + 1, np.int64)
    cdef int64_t[::1] offsets = made
    with nogil:
        for i in range(n):
            if <int64_t>tokens[i] == separator:
                offsets[k] = i + 1
                k += 1
    if has_tail:
        offsets[k] = n
    return made


def check_offsets(const int64_t[::1] offsets, int64_t num_tokens):
    """Return the first offset that is below its predecessor, below 0 or past the tokens; or -1."""
    cdef Py_ssize_t i, bad = -1
    cdef int64_t before = 0
    with nogil:
        for i in range(offsets.shape[0]):
            if offsets[i] < before or offsets[i] > num_tokens:
                bad = i
                break
            before = offsets[i]
    return bad


def cut(const int64_t[::1] offsets, const int64_t[::1] order, int64_t window, int64_t stride):
    """Cut documents, in this order, into pieces of at most a window, `stride` apart; none begins after another has reached the end.

    Returns:
        (starts, lengths) of the pieces.
    """
    cdef Py_ssize_t i, k = 0, count = 0
    cdef int64_t at, end
    if not 0 < stride <= window:
        raise ValueError(f"stride must be from 1 to the window of {window} tokens, got {stride}")
    for i in range(order.shape[0]):
        if not 0 <= order[i] < offsets.shape[0] - 1:
            raise IndexError(f"document {order[i]} is out of range: there are {offsets.shape[0] - 1}")
    with nogil:
        for i in range(order.shape[0]):
            at, end = offsets[order[i]], offsets[order[i] + 1]
            if end > at:
                count += 1 if end - at <= window else 1 + (end - at - window + stride - 1) // stride
    starts_made, lengths_made = np.empty(count, np.int64), np.empty(count, np.int32)
    cdef int64_t[::1] starts = starts_made
    cdef int32_t[::1] lengths = lengths_made
    with nogil:
        for i in range(order.shape[0]):
            at, end = offsets[order[i]], offsets[order[i] + 1]
            while at < end:
                starts[k] = at
                lengths[k] = <int32_t>min(window, end - at)
                k += 1
                if at + window >= end:
                    break
                at += stride
    return starts_made, lengths_made


def cross(const int64_t[::1] offsets, int64_t window, int64_t stride):
    """Return the plan of windows that are `stride` apart whatever the documents are: each document's part of a window is a piece.

    Returns:
        the plan: (ends, starts, lengths).
    """
    cdef Py_ssize_t num_documents = offsets.shape[0] - 1, document = 0, i, at_document, k
    cdef int64_t first = offsets[0], num_windows = 0, at, end, next_at
    cdef int is_filling
    if offsets[num_documents] - first >= window:
        num_windows = (offsets[num_documents] - first - window) // stride + 1
    ends_made = np.empty(num_windows, np.int64)
    starts_made, lengths_made = np.empty(0, np.int64), np.empty(0, np.int32)
    cdef int64_t[::1] ends = ends_made, starts = starts_made
    cdef int32_t[::1] lengths = lengths_made
    for is_filling in range(2):
        k = document = 0
        with nogil:
            for i in range(num_windows):
                at = first + i * stride
                end = at + window
                while offsets[document + 1] <= at:
                    document += 1
                at_document = document
                while at < end:
                    next_at = min(end, offsets[at_document + 1])
                    if next_at > at:
                        if is_filling:
                            starts[k] = at
                            lengths[k] = <int32_t>(next_at - at)
                        k += 1
                    at = next_at
                    at_document += 1
                ends[i] = k
        if not is_filling:
            starts_made, lengths_made = np.empty(k, np.int64), np.empty(k, np.int32)
            starts, lengths = starts_made, lengths_made
    return ends_made, starts_made, lengths_made


def pack(const int32_t[::1] lengths, int32_t window, int64_t block):
    """Pack pieces by best-fit decreasing within blocks of pieces.

    Returns:
        the window of each piece, and the number of windows. Windows are numbered in the order in which they were opened.
    """
    cdef Py_ssize_t n = lengths.shape[0], first
    cdef int64_t num_windows = 0
    cdef int failed = 0
    made = np.empty(n, np.int64)
    cdef int64_t[::1] window_of = made
    for first in range(n):
        if not 0 < lengths[first] <= window:
            raise ValueError(f"piece {first} has {lengths[first]} tokens, more than a window of {window}")
    with nogil:
        first = 0
        while first < n and not failed:
            failed = _pack_block(&lengths[first], min(block, n - first), window, &window_of[first], &num_windows)
            first += block
    if failed:
        raise MemoryError(f"cannot allocate memory to pack blocks of {block} documents into windows of {window} tokens")
    return made, num_windows


cdef int _pack_block(
    const int32_t *lengths, Py_ssize_t n, int32_t window, int64_t *window_of, int64_t *num_windows
) noexcept nogil:
    """Return 1 if out of memory."""
    cdef Py_ssize_t num_words = window // 64 + 1, i, k, word
    cdef int64_t *heads = <int64_t *>malloc((<size_t>window + 2) * sizeof(int64_t))  # counters while sorting, then the tops of the
                                                                                     # stacks
    cdef int64_t *below = <int64_t *>malloc(n * sizeof(int64_t))  # the window under each one in its stack
    cdef int64_t *order = <int64_t *>malloc(n * sizeof(int64_t))
    cdef uint64_t *rooms = <uint64_t *>calloc(num_words, sizeof(uint64_t))
    cdef int64_t opened = 0, chosen
    cdef int32_t room
    cdef uint64_t bits
    if heads == NULL or below == NULL or order == NULL or rooms == NULL:
        free(heads)
        free(below)
        free(order)
        free(rooms)
        return 1
    for i in range(window + 2):
        heads[i] = 0
    for i in range(n):
        heads[window - lengths[i] + 1] += 1
    for i in range(1, window + 2):
        heads[i] += heads[i - 1]
    for i in range(n):  # longest first; equal lengths keep their order
        order[heads[window - lengths[i]]] = i
        heads[window - lengths[i]] += 1
    for i in range(window + 2):
        heads[i] = -1
    for k in range(n):
        i = order[k]
        word = lengths[i] // 64
        bits = rooms[word] & (<uint64_t>-1 << (lengths[i] % 64))
        while bits == 0 and word + 1 < num_words:
            word += 1
            bits = rooms[word]
        if bits == 0:
            chosen, room = opened, window
            opened += 1
        else:
            room = <int32_t>(word * 64 + __builtin_ctzll(bits))
            chosen = heads[room]
            heads[room] = below[chosen]
            if heads[room] < 0:
                rooms[room // 64] &= ~(<uint64_t>1 << (room % 64))
        window_of[i] = num_windows[0] + chosen
        room -= lengths[i]
        below[chosen] = heads[room]
        heads[room] = chosen
        if room:
            rooms[room // 64] |= <uint64_t>1 << (room % 64)
    num_windows[0] += opened
    free(heads)
    free(below)
    free(order)
    free(rooms)
    return 0


def by_window(const int64_t[::1] window_of, int64_t num_windows, const int64_t[::1] starts, const int32_t[::1] lengths):
    """Return the plan: (ends, starts, lengths), with the pieces of a window in the given order."""
    cdef Py_ssize_t i, n = window_of.shape[0]
    ends_made, starts_made, lengths_made = np.zeros(num_windows + 1, np.int64), np.empty(n, np.int64), np.empty(n, np.int32)
    cdef int64_t[::1] ends = ends_made, to_starts = starts_made
    cdef int32_t[::1] to_lengths = lengths_made
    with nogil:
        for i in range(n):
            ends[window_of[i] + 1] += 1
        for i in range(num_windows):
            ends[i + 1] += ends[i]
        for i in range(n):
            to_starts[ends[window_of[i]]] = starts[i]
            to_lengths[ends[window_of[i]]] = lengths[i]
            ends[window_of[i]] += 1
    return ends_made[:num_windows], starts_made, lengths_made
