"""Questions about speed, one a file. From the project's root: python -m benchmarks, or python -m benchmarks.photos."""
