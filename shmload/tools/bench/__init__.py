"""`shmload bench`: loaders side by side on real input, in fresh processes, with their bytes compared.

    rounds ═══ measure (a fresh process) ─ contestants, workloads
      └ verdict ─ report (table, JSON) ─ plot

Nothing on the left imports torch, so that a wrong option is answered at once. Jobs and answers are plain data; datasets,
DataLoaders, collate functions and foreign loaders are named as `module:name` and made where they are used.
"""
