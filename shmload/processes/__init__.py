"""Processes of this machine: identity and rank, exit codes, children, locks, and descriptors that forked children close."""
