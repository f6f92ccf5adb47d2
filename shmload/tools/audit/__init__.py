"""`shmload verify`: from the audit files of a folder to a verdict.

verify.py       reads the files, groups them into loaders by their headers, and compares batches that should be equal
timeline.py     one loader's deliveries in order, without those that a resume rolled back
positions.py    judges epochs of seed mode and of pipelines against the schedule
passes.py       judges passes whose order a sampler made
items.py        judges the items of pipelines
findings.py     the result
"""
