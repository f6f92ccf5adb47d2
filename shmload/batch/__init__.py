"""The memory of a batch in a slot: how samples are written to it, and how the batch is made from it.

layout.py          fixed rows: the fields of a batch, their offsets, and the structure of its samples; from a sample or a schema
row_placer.py      write samples to fixed rows, or give the dataset views of them (`read_into`)
ragged_rows.py     the same for a schema with ragged or text fields; ragged.py: how ragged fields are delivered
collate.py         collate samples of any other structure, as torch does; registered_functions.py: functions that users registered
packed_batch.py    the bytes of a batch of any structure
fixed_rows.py      make the batch of tensors from fixed rows in a leased slot, in the trainer
unpacking.py       the same from a packed batch; batch_memory.py: its memory; ragged_forms.py: padded and jagged fields
mapped_batch.py    rebuild a batch around other tensors; sparse_tensors.py: the parts of a sparse tensor
array_rows.py      gather rows of arrays; text_runs.py: text by address; element_types.py: dtypes of numpy, torch and DLPack
"""
