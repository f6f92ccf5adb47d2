"""Which stream of keys each use of randomness takes, so that no two of one (seed, epoch, n) see the same numbers."""

__all__ = ["BATCHES_IN_GROUPS", "BLOCKS", "DRAWS", "GROUPS", "MIX", "RACES", "SAMPLES", "SHORT_GROUP", "WINDOWS"]

# of permutations; 0 is the plain shuffle
MIX = 1 << 61  # and from here on each round of each member of a mixture: member << 32 | round
SAMPLES = 1 << 62  # the samples before they are sorted by length
GROUPS = SAMPLES + 1  # groups of batches
SHORT_GROUP = SAMPLES + 2  # which of them is the short one
BLOCKS = SAMPLES + 3  # a BlockShuffle's blocks
WINDOWS = 1 << 63  # and from here on the samples of each of its windows

# of words, which are numbered apart
DRAWS = 0  # a weighted index per position
RACES = 1  # an exponential variable per index
BATCHES_IN_GROUPS = 2
