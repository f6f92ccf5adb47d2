"""Processes of this machine: identity, exit codes, children, file locks, and descriptors that forked children close."""
