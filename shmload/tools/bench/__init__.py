"""`shmload bench`: loaders side by side on real input, in fresh processes, with their bytes compared.

    rounds ═══ measure (a fresh process) ─ contestants, workloads
      └ verdict ─ report (table, JSON) ─ plot

The modules on the left import no torch, so that a wrong option is reported at once. Jobs and answers are plain data; datasets,
DataLoaders, collate functions and foreign loaders are named as `module:name` and created where they are used.
"""
