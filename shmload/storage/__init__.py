"""Stores of shards behind one small protocol, and folders that keep copies of them within a budget."""
