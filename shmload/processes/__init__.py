"""Processes of this machine: which one, does it live, how did it end; locks and descriptors that belong to one process alone."""
