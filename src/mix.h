/* Assign each position to a member of a mixture, so that in every prefix each member's count is within one of its share.
 *
 * Let L_i(n) be the target of member i after the first n draws (the sum of its shares) and x_i(n) its count. Tijdeman's theorem:
 * for K members, x can be chosen with |x_i(n) - L_i(n)| <= 1 - 1/(2K - 2) for all i and n, by this rule. Draw k of a member
 * (counted from 0) has a window: it opens at the first n with L_i(n) - k >= 1/(2K - 2), because before that the member would be too
 * far ahead, and must be taken no later than at the first n with L_i(n) - k > 1 - 1/(2K - 2), because otherwise the member would be
 * too far behind. At every n the open draw with the earliest end is taken; of several, the lowest member's. Shares may change from
 * draw to draw.
 *
 * Windows follow from (i, k), so the K counters are the whole state. All numbers are integers: shares are in units of 1/total,
 * total <= 2^60; L and the bounds are 128 bits wide. A member's next window follows from the last one by an addition with carry (as
 * in Bresenham's line algorithm); divisions are needed only at the start and where shares change.
 *
 * Up to SHML_SCAN_MAX members are compared one by one, without branches (15 ns a draw for 10 members; unpredictable branches cost
 * 47); more members are kept in two tournament trees, by opening and by end (76 ns for 200; two heaps cost 105, and comparing each
 * 171).
 *
 * A change here that alters one draw needs a new schedule version.
 *
 * Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980. Rejected: the largest deficit first, and
 * Webster's divisors, which deviate by 1.16 and 2.06 draws for 10 members.
 */
#ifndef SHML_MIX_H
#define SHML_MIX_H

#include <stddef.h>
#include <stdint.h>

#define SHML_SCAN_MAX 48
#define SHML_LAST_POSITION ((uint64_t)1 << 62)
#define SHML_NEVER ((uint64_t)INT64_MAX - 1) /* beyond every position; INT64_MAX means no draw, so no window may end there */

typedef unsigned __int128 shml_wide;

typedef struct {
    uint32_t num_members;
    uint32_t num_pieces;     /* runs of positions with constant shares */
    uint64_t total;          /* sum of the shares of a piece; at most 2^60 */
    const uint64_t *starts;  /* first position of each piece; starts[0] == 0 */
    const uint64_t *shares;  /* [piece][member] */
    const shml_wide *before; /* [piece][member]: L at the piece's start, in units of 1/total */
    shml_wide open, late;    /* L - k at which a draw opens, and at which it is too late, in units of 1/total */
} shml_shares;

/* The first n at which L_i(n) reaches a target, and the values needed to find the next. */
typedef struct {
    uint64_t at;    /* that n; SHML_NEVER at most */
    uint64_t over;  /* L_i(at) - target, below `share` */
    uint64_t step;  /* total / share */
    uint64_t carry; /* total % share */
    uint64_t share; /* share of the member in this piece */
    uint64_t end;   /* last n of this piece */
    uint32_t piece;
} shml_edge;

static inline shml_edge shml_edge_at(const shml_shares *shares, uint32_t member, uint32_t piece, shml_wide target) {
    const uint32_t k = shares->num_members, last = shares->num_pieces - 1;
    while (piece < last && shares->before[(size_t)(piece + 1) * k + member] < target) piece++;
    const uint64_t share = shares->shares[(size_t)piece * k + member];
    shml_edge edge = {.at = SHML_NEVER, .end = SHML_NEVER, .step = 0, .piece = piece};
    if (share == 0) return edge; /* only in the last piece, and for good */
    shml_wide missing = target - shares->before[(size_t)piece * k + member];
    shml_wide distance = (missing + share - 1) / share;
    if (distance > SHML_LAST_POSITION) return edge;
    edge.at = shares->starts[piece] + (uint64_t)distance;
    edge.over = (uint64_t)(distance * share - missing);
    edge.step = shares->total / share;
    edge.carry = shares->total % share;
    edge.share = share;
    if (piece < last) edge.end = shares->starts[piece + 1];
    return edge;
}

/* Compute the edge of the member's next draw, whose target is `total` further on. */
static inline void shml_edge_next(const shml_shares *shares, uint32_t member, shml_edge *edge, uint64_t counter, shml_wide offset) {
    const uint64_t carries = edge->over < edge->carry;
    const uint64_t at = edge->at + edge->step + carries; /* both at most 2^63: no overflow */
    if (at <= edge->end && edge->share) {
        edge->at = at;
        edge->over += (edge->share & -carries) - edge->carry;
    } else {
        *edge = shml_edge_at(shares, member, edge->piece, (shml_wide)counter * shares->total + offset);
    }
}

/* Working memory of a run: arrays of num_members, except for the trees. */
typedef struct {
    shml_edge *open, *late;
    int64_t *open_at, *late_at;      /* copies of `at`, close together for the scan */
    uint32_t num_leaves;             /* 2^k >= num_members, or 0 if the scan is used */
    int64_t *waiting, *ready;        /* trees of 2 * num_leaves: smallest open_at of waiting draws, smallest late_at of open ones */
    uint32_t *waiting_of, *ready_of; /* the member of each node */
} shml_run;

/* Return the end of a member's open draw, or INT64_MAX if it is not open. */
static inline int64_t shml_end_of(const shml_run *run, int64_t i, int64_t n) {
    return (run->late_at[i] | ((n - run->open_at[i]) >> 63)) & INT64_MAX;
}

/* Return the member whose open draw ends first, or num_members if none is open, which cannot happen. Even and odd members are
 * compared separately, so that a comparison does not wait for the previous one. */
static inline uint32_t shml_scan(const shml_run *run, uint32_t num_members, int64_t n) {
    int64_t end[2] = {INT64_MAX, INT64_MAX}, found[2] = {num_members, num_members};
    for (int64_t i = 0; i + 1 < num_members; i += 2) {
        for (int64_t odd = 0; odd < 2; odd++) {
            const int64_t less = shml_end_of(run, i + odd, n) - end[odd], is_less = less >> 63;
            end[odd] += less & is_less;
            found[odd] ^= (found[odd] ^ (i + odd)) & is_less;
        }
    }
    if (num_members % 2 && shml_end_of(run, num_members - 1, n) < end[0]) {
        end[0] = shml_end_of(run, num_members - 1, n);
        found[0] = num_members - 1;
    }
    return (uint32_t)(end[0] < end[1] || (end[0] == end[1] && found[0] < found[1]) ? found[0] : found[1]);
}

static inline void shml_tree_set(int64_t *tree, uint32_t *of, uint32_t num_leaves, uint32_t leaf, int64_t value) {
    uint32_t i = num_leaves + leaf;
    tree[i] = value;
    while (i > 1) {
        const uint32_t left = i & ~1u, right = i | 1u, is_right = tree[right] < tree[left]; /* of equals, the lower member */
        i >>= 1;
        tree[i] = is_right ? tree[right] : tree[left];
        of[i] = of[left] ^ ((of[left] ^ of[right]) & -is_right);
    }
}

/* Move the draws that open up to `n` to the tree of open draws, and return the member whose open draw ends first. */
static inline uint32_t shml_from_trees(const shml_run *run, int64_t n) {
    while (run->waiting[1] <= n) {
        const uint32_t opened = run->waiting_of[1];
        shml_tree_set(run->waiting, run->waiting_of, run->num_leaves, opened, INT64_MAX);
        shml_tree_set(run->ready, run->ready_of, run->num_leaves, opened, run->late_at[opened]);
    }
    return run->ready_of[1];
}

static inline void shml_run_begin(const shml_shares *shares, shml_run *run, const int64_t *counters) {
    const uint32_t num_leaves = run->num_leaves;
    for (uint32_t i = 0; i < 2 * num_leaves; i++) {
        run->waiting[i] = run->ready[i] = INT64_MAX;
        run->waiting_of[i] = run->ready_of[i] = i < num_leaves ? 0 : i - num_leaves;
    }
    for (uint32_t i = 0; i < shares->num_members; i++) {
        const shml_wide done = (shml_wide)counters[i] * shares->total;
        run->open[i] = shml_edge_at(shares, i, 0, done + shares->open);
        run->late[i] = shml_edge_at(shares, i, 0, done + shares->late);
        run->open_at[i] = (int64_t)run->open[i].at;
        run->late_at[i] = (int64_t)run->late[i].at;
        if (num_leaves) shml_tree_set(run->waiting, run->waiting_of, num_leaves, i, run->open_at[i]);
    }
}

/* Draw for positions [position, position + count): write members to `out`, advance the counters, return how many were drawn. */
static inline size_t shml_run_draws(const shml_shares *shares, shml_run *run, uint64_t position, int64_t *counters, uint16_t *out,
                                    size_t count) {
    for (size_t j = 0; j < count; j++) {
        const int64_t n = (int64_t)(position + j + 1);
        const uint32_t member = run->num_leaves ? shml_from_trees(run, n) : shml_scan(run, shares->num_members, n);
        if (member >= shares->num_members || run->open_at[member] > n) return j;
        const uint64_t counter = (uint64_t)++counters[member];
        shml_edge_next(shares, member, &run->open[member], counter, shares->open);
        shml_edge_next(shares, member, &run->late[member], counter, shares->late);
        run->open_at[member] = (int64_t)run->open[member].at;
        run->late_at[member] = (int64_t)run->late[member].at;
        if (run->num_leaves) {
            shml_tree_set(run->ready, run->ready_of, run->num_leaves, member, INT64_MAX);
            shml_tree_set(run->waiting, run->waiting_of, run->num_leaves, member, run->open_at[member]);
        }
        out[j] = (uint16_t)member;
    }
    return count;
}

#endif
