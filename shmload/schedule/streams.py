"""Which stream of keys each use of randomness takes, so that no two of one (seed, epoch, n) see the same numbers."""

__all__ = ["BATCHES_IN_GROUPS", "BLOCKS", "DRAWS", "GROUPS", "RACES", "ROUNDS", "SAMPLES", "SHORT_GROUP", "WINDOWS"]

# of permutations; 0 is the plain shuffle
ROUNDS = 1 << 40  # (m + 1) * ROUNDS + r is round r of a mixture's member m; there are fewer than 2^16 members
SAMPLES = 1 << 62  # the samples before they are sorted by length
GROUPS = SAMPLES + 1  # groups of batches
SHORT_GROUP = SAMPLES + 2  # which of them is the short one
BLOCKS = SAMPLES + 3  # a BlockShuffle's blocks
WINDOWS = 1 << 63  # and from here on the samples of each of its windows

# of words, which are numbered apart
DRAWS = 0  # a weighted index per position
RACES = 1  # an exponential variable per index
BATCHES_IN_GROUPS = 2
