"""The memory of a batch in a slot: fields, rows, packed batches, and the tensors made from them."""
