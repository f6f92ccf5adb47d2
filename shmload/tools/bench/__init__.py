"""`shmload bench`: loaders side by side on real input, in fresh processes, with their bytes compared.

    options ─ tasks ─ rounds ─ launch ═══ child (a fresh process) ─ measure ─ contestants, peers/, own_loader
                        │        └ samples memory from outside       └ limits: one core, no loader
                        └ comparing ─ judged (verdict, recommend) ─ report ─ table, plot, JSON

A task is a workload at one setting (sweep), warm or cold (cache). Nothing above the double line imports torch, so that a wrong
option is answered at once. Jobs and answers are plain data; datasets, DataLoaders, collate functions and foreign loaders are named
as `module:name` and made where they are used.
"""
