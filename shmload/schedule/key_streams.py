"""The numbers of random streams, one for each use of randomness. They are part of all orders, so they never change.

Two uses under one (seed, epoch, n) must never see the same random numbers, so each has a stream of its own. Permutations and
random words are numbered separately, because they use different functions.
"""

# Streams of permutations; 0 is the plain shuffle.
MIX = 1 << 61  # plus (member << 32 | round) for each round of each member of a mixture
SAMPLES = 1 << 62  # the samples before they are sorted by length
GROUPS = SAMPLES + 1  # groups of batches
SHORT_GROUP = SAMPLES + 2  # the place of the short group
BLOCKS = SAMPLES + 3  # the blocks of a BlockShuffle, the shards of a ShardShuffle
NODES = SAMPLES + 4  # the shards of a NodeShuffle, before they are cut into shares
WINDOWS = 1 << 63  # plus the number of a window, for the samples in it
# Streams of random words.
DRAWS = 0  # a weighted index per position
RACES = 1  # an exponential variable per index
BATCHES_IN_GROUPS = 2
