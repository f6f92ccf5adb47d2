"""One file a format: how it is recognised, what there is to say of it, and its index if that lies beside it."""
