"""Tokens: windows over flat files of them, and documents packed into windows."""
