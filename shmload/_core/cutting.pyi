import numpy as np
from numpy.typing import NDArray

def cut(lengths: NDArray[np.int64], budget: int, max_rows: int, starts: NDArray[np.int64]) -> int: ...
