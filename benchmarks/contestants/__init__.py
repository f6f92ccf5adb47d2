"""Other loaders for `shmload bench`. Each module has a factory that takes a dataset and options. Run from the project's root:

    shmload bench --workload tokens --loader shmload,benchmarks.contestants.webdataset:open_loader,torch
    shmload bench --loader shmload,benchmarks.contestants.ways:Threads,benchmarks.contestants.ways:torch_getitems,torch

| module | needs | how it reads |
|---|---|---|
| webdataset | webdataset | tar shards in order, split over workers, no shuffle buffer (*) |
| spdl | spdl-core | its pipeline, a thread per worker, the dataset's own functions |
| grain | grain | batches in worker processes; one pipeline for 16 epochs, because its workers take seconds to start |
| litdata | litdata | its chunks, its shuffle, its DataLoader (*) |
| mosaicml | mosaicml-streaming | MDS shards, its shuffle, its DataLoader (*); it imports torchvision, which must fit torch |
| tfdata | tensorflow-cpu | TFRecord files in order, parallel calls of a Python function, which take turns with the GIL (*) |
| dali | nvidia-dali-cuda120 | on the CPU: a parallel external source of batches; one pipeline for 16 epochs |
| ffcv | ffcv | its file, its shuffle, its compiled threads; stores arrays as they are delivered; not for photos (*) |
| ways | - | `Threads`, `torch_getitems`, `torch_inline`: torch and a thread pool; `thread_workers`: `backend="thread"` |

(*) The loader reads its own files in its own order, so its bytes are not compared. Its files are written when the loader is
created for the first time, so the first batch of the first round takes longer. The same functions decode the samples
everywhere, so the contestants differ only in how they schedule and transport samples. tf.data, DALI and FFCV have operations of
their own that are faster than a workload's function; these are not compared, because their bytes differ.
"""
