"""Other loaders for `shmload bench`, run from the project's root: one module each, with a factory that takes dataset and options.

    shmload bench --workload tokens --loader shmload,benchmarks.contestants.webdataset:open_loader,torch
    shmload bench --loader shmload,benchmarks.contestants.ways:Threads,benchmarks.contestants.ways:torch_getitems,torch

| module | needs | how it reads |
|---|---|---|
| webdataset | webdataset | tar shards in order, split over workers, no shuffle buffer (*) |
| spdl | spdl-core | its pipeline, a thread per worker, the dataset's own functions |
| grain | grain | batches in worker processes; one pipeline for 16 epochs, as its workers take seconds to start |
| litdata | litdata | its chunks, its shuffle, its DataLoader (*) |
| mosaicml | mosaicml-streaming | MDS shards, its shuffle, its DataLoader (*); it imports torchvision, which must fit torch |
| tfdata | tensorflow-cpu | TFRecord files in order, parallel calls of a Python function, which take turns with the GIL (*) |
| dali | nvidia-dali-cuda120 | on the CPU: a parallel external source of batches; one pipeline for 16 epochs |
| ffcv | ffcv | its file, its shuffle, its compiled threads; arrays as they are delivered; not photos (*) |
| ways | - | `Threads`, `torch_getitems`, `torch_inline`: torch and a thread pool; `thread_workers`: `backend="thread"` |

(*) has files and an order of its own, and its bytes are not compared. Its files are written when the loader is made
for the first time, so the first batch of the first round takes longer. Samples are decoded by the same functions everywhere, so
contestants differ in their plumbing only. tf.data, DALI and FFCV have operations of their own that are quicker than a workload's
function; their bytes differ, so they are not what is compared.
"""
