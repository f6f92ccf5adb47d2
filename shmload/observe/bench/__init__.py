"""`shmload bench`: loaders side by side on real input, in fresh processes, with their bytes compared.

    options ─ rounds ─ launch ═══ child (a fresh process) ─ measure ─ contestants
                │         └ samples memory from outside       └ limits: one core, no loader
                └ report ─ table, plot, JSON

Nothing above the double line imports torch, so that a wrong option is answered at once. Jobs and answers are plain
data; datasets, collate functions and foreign loaders are named as `module:name` and made where they are used.
"""
