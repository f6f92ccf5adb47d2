"""TFRecord: files of records, most of them tf.train.Examples.

`TFRecordDataset` reads local files by record number, `TFRecordWriter` writes them, and `TFRecords` (tfrecord_format.py) is the
format for `RemoteDataset` and `shmload inspect`.

A file is mapped without being kept open. Record offsets are found in one pass over the file and kept next to it as
`.shmload-index`. Native code (src/records.pyx) first surveys the records of a batch, which finds their fields and checks them, and
then writes the fields into rows. Fields with `decode=` are read as bytes, sample by sample; an `ImageDecoder` writes into the row.
The writer computes the size of an Example first, and then encodes it once, directly into the output buffer (src/record_writer.pyx).
"""
