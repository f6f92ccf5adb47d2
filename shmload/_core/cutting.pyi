"""Cut samples into batches whose padded size stays within a budget."""

import numpy as np
from numpy.typing import NDArray

def cut(lengths: NDArray[np.int64], budget: int, max_rows: int, starts: NDArray[np.int64]) -> int: ...
