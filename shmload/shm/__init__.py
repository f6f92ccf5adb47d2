"""Shared memory and doorbells between processes. No other package creates files in /dev/shm; some make memfds of their own.

segment.py        named shared memory that one process creates and others open
doorbell.py       semaphores by which one process wakes another
segment_group.py  the segments and doorbells of one loader, closed together
names.py          the names of their files in /dev/shm
free_memory.py    how much memory is left, limited by cgroups.py
janitor.py        removes the files of dead loaders; reaper.py removes them when this process is killed
meeting.py        a shared board by which the processes of one run find each other
pickling.py       pickles for processes of this machine, and for other machines
fork_copies.py    copies of batches for a forked child
host.py           reads the properties of a host from /proc and /sys, for `shmload doctor` and the launcher
"""
