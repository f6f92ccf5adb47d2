"""`shmload bench`: loaders side by side on real input, in fresh processes, with their bytes compared.

    rounds.py ═══ measure.py (in fresh processes) ─ contestants.py (loaders and workloads)
      └ conclusions.py (verdict.py, recommendation.py) ─ report.py, report_table.py, plot.py

Jobs and answers are plain data; datasets, DataLoaders, collate functions and foreign loaders are named as `module:name` and created
where they are used.
"""
