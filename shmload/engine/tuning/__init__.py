"""Tune the settings that are given as "auto".

`autotune.py` measures a running engine and changes its settings, as `tuning_decision.py` decides within the limits that
`tuning_limits.py` computes. `auto_number.py` is a number that still means "auto" when it is passed on.

Rejected: a separate thread that tunes num_workers="auto", because it would compete with the trainer for the GIL.
"""
