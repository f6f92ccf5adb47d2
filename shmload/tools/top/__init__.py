"""`shmload top`: the loaders of this host, as a report and as a picture for a terminal.

watch.py            reports what has happened since the last look
picture.py          draws all loaders
loader_panel.py     draws one loader
workers_table.py    draws its workers
bars.py             draws bars and sparklines
quantities.py       writes numbers, sizes, and durations
"""
