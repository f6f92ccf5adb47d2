"""How a batch lies in a slot: fields, rows, packed batches, and the tensors made from them."""
