"""Numbers of the random streams, one for each use of randomness.

Two uses under one (seed, epoch, n) must never see the same random numbers, so each has a stream of its own. Permutations and
random words are numbered separately, because they use different functions.
"""

# of permutations; 0 is the plain shuffle
MIX = 1 << 61  # and from here on each round of each member of a mixture: member << 32 | round
SAMPLES = 1 << 62  # the samples before they are sorted by length
GROUPS = SAMPLES + 1  # groups of batches
SHORT_GROUP = SAMPLES + 2  # which of them is the short one
BLOCKS = SAMPLES + 3  # a BlockShuffle's blocks
NODES = SAMPLES + 4  # a NodeShuffle's shards, before they are cut into shares
WINDOWS = 1 << 63  # and from here on the samples of each of its windows
# of words, which are numbered apart
DRAWS = 0  # a weighted index per position
RACES = 1  # an exponential variable per index
BATCHES_IN_GROUPS = 2
