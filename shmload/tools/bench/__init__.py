"""`shmload bench`: loaders side by side on real input, in fresh processes, with their bytes compared.

    rounds.py ═══ bench_job.py ═══ measure.py (in fresh processes) ─ contestants.py, users_loader.py (the loaders)
      │                            └ measured_stream.py, core_limit.py ─ batch_contents.py, tree_usage.py, decoded_samples.py
      ├ bench_options.py, task.py ─ builtin_workloads.py (workload.py, workload_table.py, photos.py, generated_data.py)
      └ byte_comparison.py, conclusions.py (verdict.py, recommendation.py) ─ report.py, report_table.py, plot.py

Jobs and answers are plain data; datasets, DataLoaders, collate functions and foreign loaders are named as `module:name` and created
where they are used.
"""
