"""TFRecord: files of records, most of them tf.train.Examples.

A file is mapped without being kept open. Record offsets are found in one pass over the file and kept next to it as
`.shmload-index`. src/records.pyx surveys the records of a batch and then writes them into rows. Fields with `decode=` are read as
bytes, sample by sample; an `ImageDecoder` writes into the row. The writer computes the size of an Example first, and then encodes
it once, directly into the output buffer (src/record_writer.pyx).
"""
