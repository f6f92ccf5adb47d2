"""Run all benchmarks, one after another, and print one table: `python -m benchmarks [--json FILE]`."""

import importlib

from benchmarks.common import Result, Row, arguments, markdown, save

BENCHMARKS = (
    "crossed",
    "trainer_cpu",
    "python_dataset",
    "tiny_rows",
    "gil",
    "small_tensors",
    "first_batch",
    "start_methods",
    "thread_workers",
    "start_up",
    "launching",
    "high_latency",
    "photos",
    "resume",
    "variable_length",
    "text",
    "as_lists",
    "mix",
    "pipeline",
    "five_pipelines",
    "huggingface",
    "audit",
    "autotune",
    "share",
    "shared_index",
    "tar",
    "layouts",
    "columnar",
    "tfrecord",
    "growing",
    "images",
    "packing",
    "arrays",
    "tokens",
    "cache",
    "store",
    "stats",
    "remote",
    "remote_http",
    "remote_tokens",
    "gpu",
    "gpu_training",
    "cluster",
    "local_workers",
    "scale",
    "curves",
)


def run_all() -> None:
    """Runs every benchmark and prints one table."""
    settings, path = arguments(__doc__)
    results: dict[str, Result] = {}
    for name in BENCHMARKS:
        results[name] = importlib.import_module(f"benchmarks.{name}").measure(settings)
        save(path, results)  # after each one, so that an interrupted run keeps its results
    rows: list[Row] = [row for result in results.values() for row in result.rows]
    print(markdown(rows))


if __name__ == "__main__":
    run_all()
