"""Benchmarks, one per file. In the project's root, run `python -m benchmarks`, or one of them as `python -m benchmarks.photos`."""
