"""TFRecord files: records, tf.train.Example and SequenceExample."""
