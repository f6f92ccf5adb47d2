"""Running loaders, seen from outside and from inside: the words of a control block, and what they mean."""
