"""Shared memory and doorbells between processes. No other room uses /dev/shm, memfd or the resource tracker.

segment.py        named shared memory that one process creates and others open
doorbell.py       semaphores by which one process wakes another
segment_group.py  the segments and doorbells of one loader, closed together
names.py          the names of their files in /dev/shm
free_memory.py    how much memory is left, limited by cgroups.py
janitor.py        removes the files of dead loaders; reaper.py removes them when this process is killed
meeting.py        where the processes of one run exchange messages
pickling.py       pickles for processes of this machine, and for other machines
fork_copies.py    copies of batches for a forked child
host.py           a host as /proc and /sys describe it
"""
