"""`shmload verify`: judge the audit files of a folder.

    verify.py       reads the files, groups them into loaders by their headers, and compares batches that should be equal
    deliveries.py   holds the deliveries, ends of epochs, and restarts that audit files record
    batch_keys.py   reads the keys of a recorded batch
    timeline.py     puts one loader's deliveries in order, and marks those that a resume rolled back
    positions.py    judges epochs of seed mode and of pipelines against the schedule
    passes.py       judges passes whose order a sampler made
    items.py        judges the items of pipelines
    findings.py     holds the result

`shmload/audit/` writes and reads the files.
"""
