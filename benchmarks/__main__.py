"""All benchmarks, one after another; prints one table.  python -m benchmarks [--json FILE]"""

from collections.abc import Callable

from benchmarks import (
    arrays,
    audit,
    autotune,
    cache,
    cluster,
    columnar,
    first_batch,
    gil,
    gpu,
    growing,
    high_latency,
    huggingface,
    images,
    local_workers,
    mix,
    packing,
    photos,
    pipeline,
    python_dataset,
    remote,
    remote_http,
    resume,
    share,
    shared_index,
    small_tensors,
    start_methods,
    start_up,
    stats,
    store,
    tar,
    text,
    tfrecord,
    tiny_rows,
    tokens,
    trainer_cpu,
    variable_length,
)
from benchmarks.common import Result, Row, Settings, arguments, markdown, save

BENCHMARKS: dict[str, Callable[[Settings], Result]] = {
    "trainer_cpu": trainer_cpu.measure,
    "python_dataset": python_dataset.measure,
    "tiny_rows": tiny_rows.measure,
    "gil": gil.measure,
    "small_tensors": small_tensors.measure,
    "first_batch": first_batch.measure,
    "start_methods": start_methods.measure,
    "start_up": start_up.measure,
    "high_latency": high_latency.measure,
    "photos": photos.measure,
    "resume": resume.measure,
    "variable_length": variable_length.measure,
    "text": text.measure,
    "mix": mix.measure,
    "pipeline": pipeline.measure,
    "huggingface": huggingface.measure,
    "audit": audit.measure,
    "autotune": autotune.measure,
    "share": share.measure,
    "shared_index": shared_index.measure,
    "tar": tar.measure,
    "columnar": columnar.measure,
    "tfrecord": tfrecord.measure,
    "growing": growing.measure,
    "images": images.measure,
    "packing": packing.measure,
    "arrays": arrays.measure,
    "tokens": tokens.measure,
    "cache": cache.measure,
    "store": store.measure,
    "stats": stats.measure,
    "remote": remote.measure,
    "remote_http": remote_http.measure,
    "gpu": gpu.measure,
    "cluster": cluster.measure,
    "local_workers": local_workers.measure,
}


def run_all() -> None:
    """Runs every benchmark and prints one table."""
    settings, path = arguments(__doc__)
    results = {}
    for name, measure in BENCHMARKS.items():
        results[name] = measure(settings)
        save(path, results)  # after each: a long run that is stopped keeps what it has
    rows: list[Row] = [row for result in results.values() for row in result.rows]
    print(markdown(rows))


if __name__ == "__main__":
    run_all()
