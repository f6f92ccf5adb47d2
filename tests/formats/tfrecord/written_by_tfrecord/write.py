"""Write the files in this folder with the `tfrecord` package (1.14.6). `python write.py check FILE` reads ours."""

import sys
from pathlib import Path

import numpy as np
from tfrecord import TFRecordWriter
from tfrecord.reader import tfrecord_loader
from tfrecord.tools.tfrecord2idx import create_index

HERE = Path(__file__).parent

if sys.argv[1:2] == ["check"]:
    for sample in tfrecord_loader(sys.argv[2], None):
        print({name: value.tolist() if hasattr(value, "tolist") else value for name, value in sorted(sample.items())})
else:
    plain = TFRecordWriter(str(HERE / "plain.tfrecord"))
    for i in range(5):
        plain.write(
            {
                "floats": (np.float32([i + 0.5, -i, 3.25]), "float"),
                "ints": ([-i, 300 * i], "int"),
                "ragged": (list(range(i)), "int"),
                "text": (f"text {i}".encode(), "byte"),
            }
        )
    plain.close()
    create_index(str(HERE / "plain.tfrecord"), str(HERE / "plain.tfindex"))
    sequence = TFRecordWriter(str(HERE / "sequence.tfrecord"))
    for i in range(4):
        sequence.write({"label": (i, "int")}, {"frames": ([[t, i] for t in range(i)], "float")})
    sequence.close()
