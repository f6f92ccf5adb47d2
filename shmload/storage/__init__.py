"""Where shards live: stores behind one small protocol, and the folders that keep copies of them within a budget."""
