"""The packed index: what a dataset knows of its samples, once per node instead of once per worker."""
