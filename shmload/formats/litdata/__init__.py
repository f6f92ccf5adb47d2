"""The format LitData: the chunks that its function `optimize` writes, and their index.json."""
