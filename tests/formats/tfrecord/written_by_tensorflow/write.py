"""Write the files in this folder with TensorFlow (2.21). `python write.py check FILE` reads a file of shmload with it."""

import sys
from pathlib import Path

import tensorflow as tf

HERE = Path(__file__).parent


def example(i):
    f = tf.train.Feature
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                "floats": f(float_list=tf.train.FloatList(value=[i + 0.5, -i, 3.25])),
                "ints": f(int64_list=tf.train.Int64List(value=[-i, 300 * i])),
                "ragged": f(int64_list=tf.train.Int64List(value=range(i))),
                "text": f(bytes_list=tf.train.BytesList(value=[f"text {i}".encode()])),
            }
        )
    ).SerializeToString(deterministic=True)


def sequence(i):
    f = tf.train.Feature
    frames = [f(float_list=tf.train.FloatList(value=[t, i])) for t in range(i)]
    return tf.train.SequenceExample(
        context=tf.train.Features(feature={"label": f(int64_list=tf.train.Int64List(value=[i]))}),
        feature_lists=tf.train.FeatureLists(feature_list={"frames": tf.train.FeatureList(feature=frames)}),
    ).SerializeToString(deterministic=True)


if sys.argv[1:2] == ["check"]:
    for data in tf.data.TFRecordDataset(sys.argv[2]):
        message = tf.train.Example.FromString(data.numpy())
        print(
            sorted((k, v.WhichOneof("kind")) for k, v in message.features.feature.items()),
            message.SerializeToString(deterministic=True) == data.numpy(),
        )
else:
    for name, kind in (("plain", ""), ("gzip", "GZIP"), ("zlib", "ZLIB")):
        with tf.io.TFRecordWriter(str(HERE / f"{name}.tfrecord"), kind) as writer:
            for i in range(5):
                writer.write(example(i))
    with tf.io.TFRecordWriter(str(HERE / "sequence.tfrecord")) as writer:
        for i in range(4):
            writer.write(sequence(i))
