"""The draws of a mixture, and the orders of its members, round after round. See mix.h for the method and its source.

A run can begin at any position if its counters are known: nothing else is kept between two runs.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

cdef extern from "mix.h" nogil:
    const int SHML_SCAN_MAX
    const uint64_t SHML_LAST_POSITION
    ctypedef struct shml_wide:
        pass
    ctypedef struct shml_edge:
        pass
    ctypedef struct shml_shares:
        uint32_t num_members, num_pieces
        uint64_t total
        const uint64_t *starts
        const uint64_t *shares
    ctypedef struct shml_run:
        shml_edge *open
        shml_edge *late
        int64_t *open_at
        int64_t *late_at
        uint32_t num_leaves
        int64_t *waiting
        int64_t *ready
        uint32_t *waiting_of
        uint32_t *ready_of
    void shml_run_begin(const shml_shares *shares, shml_run *run, const int64_t *counters)
    size_t shml_run_draws(const shml_shares *shares, shml_run *run, uint64_t position, int64_t *counters, uint16_t *out,
                          size_t count)

cdef extern from *:
    """
    #include <stdlib.h>
    /* Compute the state at the start of each piece, and the two edges of a window; Cython has no 128-bit numbers. */
    static int shml_shares_finish(shml_shares *shares) {
        const uint32_t k = shares->num_members;
        uint32_t num_drawn = 0;
        shml_wide *before = calloc((size_t)shares->num_pieces * k, sizeof(shml_wide));
        if (before == NULL) return 0;
        for (uint32_t i = 0; i < k; i++) {
            int is_drawn = 0;
            for (uint32_t piece = 0; piece < shares->num_pieces; piece++) {
                const size_t here = (size_t)piece * k + i;
                is_drawn |= shares->shares[here] > 0;
                if (piece + 1 < shares->num_pieces)
                    before[here + k] =
                        before[here] + (shml_wide)shares->shares[here] * (shares->starts[piece + 1] - shares->starts[piece]);
            }
            num_drawn += (uint32_t)is_drawn;
        }
        const uint64_t parts = num_drawn > 2 ? 2 * (uint64_t)num_drawn - 2 : 2; /* a single member has windows of one draw */
        shares->before = before;
        shares->open = (shares->total + parts - 1) / parts;
        shares->late = (shml_wide)shares->total * (parts - 1) / parts + 1;
        return 1;
    }
    static void shml_shares_free(shml_shares *shares) {
        free((void *)shares->before);
        free((void *)shares->starts);
        free((void *)shares->shares);
    }
    """
    int shml_shares_finish(shml_shares *shares)
    void shml_shares_free(shml_shares *shares)

cdef extern from "permutation.h" nogil:
    ctypedef struct shml_key:
        uint64_t seed, n, epoch, stream
    ctypedef struct shml_feistel:
        pass
    ctypedef void (*shml_network)(const shml_feistel *, uint64_t *, int)
    const int SHML_MAX_ROUNDS
    void shml_shuffle(const shml_key *key, uint16_t *table)
    void shml_feistel_init(shml_feistel *feistel, const shml_key *key, int num_rounds)
    int shml_best_isa()
    shml_network shml_network_for(int isa, int is_inverse)
    void shml_map_values(const shml_feistel *feistel, shml_network network, uint64_t *values, size_t count)

SCAN_MAX = SHML_SCAN_MAX
MAX_MEMBERS = (1 << 16) - 1
cdef uint64_t TABLE_MAX_N = 1 << 16


cdef class Draws:
    """The draws of members by their shares, from any position whose counters are known.

    Args:
        starts: first position of each piece, rising from 0.
        shares: of each member in each piece, in units of 1/total; each piece adds up to total, which is at most 2^60.
        scan_max: most members that are compared one by one. Changed only by tests; draws do not depend on it.
    """

    cdef shml_shares _shares
    cdef uint32_t _num_leaves

    def __cinit__(self, const uint64_t[::1] starts, const uint64_t[:, ::1] shares, *, uint32_t scan_max=SHML_SCAN_MAX):
        cdef uint32_t num_pieces = shares.shape[0], num_members = shares.shape[1], piece, i
        cdef uint64_t total = 0, sum_of_piece
        cdef uint64_t *own_starts
        cdef uint64_t *own_shares
        if not (1 <= num_members <= MAX_MEMBERS and num_pieces >= 1 and starts.shape[0] == num_pieces and starts[0] == 0):
            raise ValueError(f"each of the {starts.shape[0]} pieces must have shares of 1 to {MAX_MEMBERS} members, and the first must start at 0, "
                             f"got {num_pieces} pieces of {num_members} members")
        own_starts = <uint64_t *>malloc(num_pieces * sizeof(uint64_t))
        own_shares = <uint64_t *>malloc(<size_t>num_pieces * num_members * sizeof(uint64_t))
        self._shares.starts = own_starts
        self._shares.shares = own_shares
        if own_starts == NULL or own_shares == NULL:
            raise MemoryError
        for piece in range(num_pieces):
            sum_of_piece = 0
            own_starts[piece] = starts[piece]
            for i in range(num_members):
                own_shares[<size_t>piece * num_members + i] = shares[piece, i]
                if shares[piece, i] > (<uint64_t>1 << 60) - sum_of_piece:
                    raise ValueError(f"the shares of a piece must add up to at most 2^60, got more in piece {piece}")
                sum_of_piece += shares[piece, i]
            if piece == 0:
                total = sum_of_piece
            if sum_of_piece == 0 or sum_of_piece != total:
                raise ValueError(f"the shares of all pieces must add up to the same positive total, got {total} and {sum_of_piece}")
            if piece and not starts[piece - 1] < starts[piece] <= SHML_LAST_POSITION:
                raise ValueError(f"the starts of pieces must increase and be at most 2^62, got {starts[piece]} after {starts[piece - 1]}")
        self._shares.num_pieces = num_pieces
        self._shares.num_members = num_members
        self._shares.total = total
        if not shml_shares_finish(&self._shares):
            raise MemoryError
        if num_members > scan_max:
            self._num_leaves = 1
            while self._num_leaves < num_members:
                self._num_leaves *= 2

    def __dealloc__(self):
        shml_shares_free(&self._shares)

    def run(self, uint64_t position, int64_t[::1] counters, uint16_t[::1] out):
        """Write the members drawn at positions [position, position + len(out)) into out, and advance the counters.

        Args:
            counters: draws of each member before `position`.
        Raises:
            ValueError: the counters do not belong to this position: no member may be drawn.
        """
        cdef shml_run run
        cdef size_t k = self._shares.num_members, leaves = 2 * <size_t>self._num_leaves, done, count = out.shape[0]
        cdef char *memory
        if <size_t>counters.shape[0] != k or position > SHML_LAST_POSITION or count > SHML_LAST_POSITION:
            raise ValueError(f"{k} counters and a position of at most 2^62 are required, got {counters.shape[0]} counters and position {position}")
        if count == 0:
            return
        memory = <char *>calloc(1, k * (2 * sizeof(shml_edge) + 2 * sizeof(int64_t)) + leaves * 2 * (sizeof(int64_t) + sizeof(uint32_t)))
        if memory == NULL:
            raise MemoryError
        run.open = <shml_edge *>memory
        run.late = run.open + k
        run.open_at = <int64_t *>(run.late + k)
        run.late_at = run.open_at + k
        run.num_leaves = self._num_leaves
        run.waiting = run.late_at + k
        run.ready = run.waiting + leaves
        run.waiting_of = <uint32_t *>(run.ready + leaves)
        run.ready_of = run.waiting_of + leaves
        with nogil:
            shml_run_begin(&self._shares, &run, &counters[0])
            done = shml_run_draws(&self._shares, &run, position, &counters[0], &out[0], count)
        free(memory)
        if done < count:
            raise ValueError(f"the counters do not belong to position {position}: no member may be drawn at {position + done}")


cdef class Rounds:
    """A member's samples round after round: round r is the permutation of (seed, epoch, stream + r), or the samples' own order.

    Args:
        size: number of the member's samples, at least 1.
        stream: stream of round 0.
        num_streams: number of rounds after which the orders repeat.
    """

    cdef shml_key _key
    cdef shml_feistel _feistel
    cdef shml_network _network
    cdef uint16_t *_table            # NULL if the network is used, or the order is the samples' own
    cdef uint64_t _stream, _num_streams
    cdef bint _shuffled, _is_set

    def __cinit__(self, uint64_t size, *, bint shuffle, uint64_t seed, uint64_t epoch, uint64_t stream, uint64_t num_streams):
        if not 1 <= size <= SHML_LAST_POSITION or num_streams == 0:
            raise ValueError(f"a member must have 1 to 2^62 samples and at least one stream, got {size} samples and {num_streams} streams")
        self._key = shml_key(seed=seed, n=size, epoch=epoch, stream=stream)
        self._stream, self._num_streams = stream, num_streams
        self._shuffled = shuffle
        self._network = shml_network_for(shml_best_isa(), 0)
        if shuffle and size <= TABLE_MAX_N:
            self._table = <uint16_t *>malloc(size * sizeof(uint16_t))
            if self._table == NULL:
                raise MemoryError

    def __dealloc__(self):
        free(self._table)

    def fill(self, uint64_t first, int64_t[::1] out, *, int64_t offset, uint64_t lap, uint64_t num_laps):
        """Write draws [first, first + len(out)) of the member into out: offset + its sample + lap * (round % num_laps)."""
        cdef size_t count = out.shape[0], done = 0, i, length
        cdef uint64_t size = self._key.n, turn, place
        cdef int64_t base
        with nogil:
            while done < count:
                turn, place = (first + done) // size, (first + done) % size
                length = min(count - done, size - place)
                base = offset + <int64_t>(lap * (turn % num_laps))
                if self._shuffled:
                    self._set_round(self._stream + turn % self._num_streams)
                if self._table != NULL:
                    for i in range(length):
                        out[done + i] = base + self._table[place + i]
                else:
                    for i in range(length):
                        out[done + i] = <int64_t>(place + i)
                    if self._shuffled:
                        shml_map_values(&self._feistel, self._network, <uint64_t *>&out[done], length)
                    for i in range(length):
                        out[done + i] += base
                done += length

    cdef void _set_round(self, uint64_t stream) noexcept nogil:
        if self._is_set and self._key.stream == stream:
            return
        self._key.stream = stream
        self._is_set = True
        if self._table != NULL:
            shml_shuffle(&self._key, self._table)
        else:
            shml_feistel_init(&self._feistel, &self._key, SHML_MAX_ROUNDS)
