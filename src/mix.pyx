"""Which member of a mixture each draw goes to, so that every prefix keeps to the weights within one sample.

Tijdeman's chairman assignment as earliest deadline first. Member i's share of the first n draws is Lambda_i(n) = L_i(n) / D, with
whole numbers L and D. With K members and c = 1 - 1/(2K - 2), its j-th draw may come from the first n on at which j - Lambda_i(n) <= c,
and must come by the first n at which Lambda_i(n) - (j - 1) > c. Among the members whose window is open the one takes the draw that must
come first. That this always works out, also for shares that change on the way, is Tijdeman's theorem; so |x_i(n) - Lambda_i(n)| <= c.

Windows are closed forms of (i, j), so the counters x are all there is to keep.

Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from *:
    """
    typedef __int128 shml_i128;
    """
    ctypedef long long shml_i128  # wider than that


cdef struct shml_window:  # of a member's next draw
    int64_t release         # the first draw that may be it
    int64_t deadline        # the last
    int64_t stride          # D // weight
    int64_t stride_rest     # D % weight
    int64_t release_rest    # weight * release less what it had to reach; below weight
    int64_t deadline_rest   # the same of the deadline


cdef class Apportionment:
    """The draws of K members over pieces of constant weights.

    Args:
        starts: where each piece begins: positions from 0 up, ascending.
        weights: whole numbers by piece and member, at least 0; each piece's sum is `denominator`, at most 2^52.
    Raises:
        ValueError: they are not.
    """

    cdef readonly int num_members
    cdef readonly int64_t denominator
    cdef int _num_pieces
    cdef int64_t _margin      # ceil(D / (2K - 2))
    cdef int64_t *_starts     # [piece]
    cdef int64_t *_weights    # [piece * K + member]
    cdef shml_i128 *_bases    # [piece * K + member]: D times the member's share of all draws before the piece

    def __cinit__(self, const int64_t[::1] starts, const int64_t[:, ::1] weights, int64_t denominator):
        cdef int piece, member
        cdef int64_t total
        cdef int num_pieces = <int>starts.shape[0], num_members = <int>weights.shape[1]
        if num_pieces < 1 or weights.shape[0] != num_pieces or not 1 <= num_members <= 65536:
            raise ValueError(f"weights for {num_pieces} pieces and 1 to 65536 members are needed, got {weights.shape[0]} x {num_members}")
        if not 0 < denominator <= <int64_t>1 << 52:
            raise ValueError(f"the weights of a piece must add up to 1 to 2^52, got {denominator}")
        self.num_members, self._num_pieces, self.denominator = num_members, num_pieces, denominator
        self._margin = 0 if num_members == 1 else (denominator + 2 * num_members - 3) // (2 * num_members - 2)
        self._starts = <int64_t *>malloc(num_pieces * sizeof(int64_t))
        self._weights = <int64_t *>malloc(num_pieces * num_members * sizeof(int64_t))
        self._bases = <shml_i128 *>malloc(num_pieces * num_members * sizeof(shml_i128))
        if self._starts == NULL or self._weights == NULL or self._bases == NULL:
            raise MemoryError
        for piece in range(num_pieces):
            if starts[piece] < 0 or (starts[piece] <= starts[piece - 1] if piece else starts[piece] != 0):
                raise ValueError("pieces begin at 0 and ascend")
            self._starts[piece] = starts[piece]
            total = 0
            for member in range(num_members):
                if not 0 <= weights[piece, member] <= denominator:
                    raise ValueError(f"weight {weights[piece, member]} is outside 0 to {denominator}")
                total += weights[piece, member]
                self._weights[piece * num_members + member] = weights[piece, member]
                self._bases[piece * num_members + member] = 0 if piece == 0 else (
                    self._bases[(piece - 1) * num_members + member]
                    + <shml_i128>self._weights[(piece - 1) * num_members + member] * (starts[piece] - starts[piece - 1])
                )
            if total != denominator:
                raise ValueError(f"the weights of piece {piece} add up to {total}, not {denominator}")

    def __dealloc__(self):
        free(self._starts)
        free(self._weights)
        free(self._bases)

    def draw(self, int64_t position, int64_t[::1] counters not None, uint16_t[::1] members not None):
        """Writes whose the draws from `position` on are into `members`, and what the counters are after them into `counters`.

        Args:
            counters: draws of each member before `position`.
        Raises:
            ValueError: the counters are not those of that position.
        """
        cdef int member, chosen, num_members = self.num_members
        cdef int64_t n, earliest, total = 0
        cdef Py_ssize_t i
        cdef shml_window *windows
        cdef shml_window *window
        if counters.shape[0] != num_members:
            raise ValueError(f"{num_members} counters are needed, got {counters.shape[0]}")
        for member in range(num_members):
            total += counters[member]
        if total != position:
            raise ValueError(f"the counters add up to {total}, at position {position}")
        windows = <shml_window *>malloc(num_members * sizeof(shml_window))
        if windows == NULL:
            raise MemoryError
        chosen = 0
        with nogil:
            for member in range(num_members):
                self._open(member, counters[member] + 1, &windows[member])
            for i in range(members.shape[0]):
                n = position + i + 1  # this draw is the n-th
                earliest, chosen = INT64_MAX, -1
                for member in range(num_members):
                    if windows[member].deadline < earliest and windows[member].release <= n:
                        earliest, chosen = windows[member].deadline, member
                if chosen < 0 or earliest < n:
                    chosen = -1
                    break
                members[i] = <uint16_t>chosen
                counters[chosen] += 1
                window = &windows[chosen]
                if self._num_pieces > 1 or num_members == 1 or window.deadline >= INT64_MAX - 1:
                    self._open(chosen, counters[chosen] + 1, window)
                    continue
                # the next window by addition: both ends move on by D / weight, rounded so that what is left over stays below it
                window.release += window.stride
                window.release_rest -= window.stride_rest
                if window.release_rest < 0:
                    window.release += 1
                    window.release_rest += self._weights[chosen]
                window.deadline += window.stride
                window.deadline_rest -= window.stride_rest
                if window.deadline_rest < 0:
                    window.deadline += 1
                    window.deadline_rest += self._weights[chosen]
        free(windows)
        if chosen < 0 and members.shape[0]:
            raise ValueError("the counters are not those of the weights at that position")

    cdef void _open(self, int member, int64_t j, shml_window *window) noexcept nogil:
        """When the member's j-th draw may come first, and when at the latest."""
        cdef shml_i128 whole = <shml_i128>j * self.denominator
        cdef shml_i128 first = whole - self.denominator + self._margin, last = whole - self._margin + 1
        cdef int64_t weight = self._weights[member]
        if self.num_members == 1:
            window.release = window.deadline = j
            return
        window.release = self._first_at(member, first)
        window.deadline = self._first_at(member, last)
        if window.deadline == INT64_MAX and window.release != INT64_MAX:
            window.deadline = INT64_MAX - 1  # it may be drawn, and need not
        if self._num_pieces == 1 and window.deadline < INT64_MAX - 1:
            window.stride = self.denominator // weight
            window.stride_rest = self.denominator % weight
            window.release_rest = <int64_t>(<shml_i128>window.release * weight - first)
            window.deadline_rest = <int64_t>(<shml_i128>window.deadline * weight - last)

    cdef int64_t _first_at(self, int member, shml_i128 target) noexcept nogil:
        """The first n at which L_member(n) >= target; INT64_MAX if there is none."""
        cdef int piece = self._num_pieces - 1, at
        while piece > 0 and self._bases[piece * self.num_members + member] >= target:
            piece -= 1
        at = piece * self.num_members + member
        cdef shml_i128 missing = target - self._bases[at]
        cdef int64_t weight = self._weights[at]
        if missing <= 0:
            return self._starts[piece]
        if weight == 0:
            return INT64_MAX
        cdef shml_i128 n
        if missing <= INT64_MAX:
            n = (<uint64_t>missing + <uint64_t>weight - 1) // <uint64_t>weight
        else:
            n = (missing + weight - 1) // weight
        n += self._starts[piece]
        return INT64_MAX - 1 if n >= INT64_MAX else <int64_t>n

    def first_at(self, int member, target):
        """The first number of draws of which the member's share, times the denominator, is `target` or more; None if never."""
        cdef int64_t n = self._first_at(member, _as_128(target))
        return None if n >= INT64_MAX - 1 else n


cdef shml_i128 _as_128(target):
    """A Python int of up to 126 bits."""
    cdef uint64_t low = target & 0xFFFFFFFFFFFFFFFF
    cdef int64_t high = target >> 64
    return (<shml_i128>high << 64) | <shml_i128>low
