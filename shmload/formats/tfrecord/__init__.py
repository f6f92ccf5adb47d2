"""TFRecord: files of records, most of them tf.train.Examples."""
