"""TFRecord: files of records, most of them tf.train.Examples.

A file is mapped without being kept open. Record offsets are found in one walk and kept beside it as `.shmload-index`.
src/records.pyx surveys the records of a batch and then writes them into rows. Fields with `decode=` are read as bytes, sample by
sample; an `ImageDecoder` writes into the row. Writing sizes an Example first and then encodes it once, at its place
(src/record_writer.pyx).
"""
