"""LitData: the chunks that its `optimize` writes."""
