"""The two examples of the specification as published, with real paths and a working decoder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import shmload

slow = pytest.mark.slow(reason="the example is a program in a process of its own")
PICTURES = Path(shmload.__file__).parent / "data"

FIRST = """\
import os
import torch
import torch.distributed as dist
from conveyer import Permutation, Collate, Partition, Conveyer, DistributedBatchedMap

def load_image(path: str) -> dict[str, torch.Tensor]:
    # up to you to implement this.
    return dict(image=None)

if __name__ == '__main__':
    all_files = os.glob('path/to/images/*.jpg')
    pipeline = Conveyer([
        # We want a random permutation of all available files.
        Permutation(len(all_files)),
        # Each GPU gets its own partition of that permutation. This must always occur before distributed work!
        Partition(dist.get_rank(), dist.get_world_size()),
        # Load images in parallel.
        DistributedBatchedMap(load_image, n_workers=4),
        # Collage several images into a batch.
        Collate(batch_size=8),
    ])

    # Grab a batch! Note that every rank gets distinct data.
    batch = pipeline()
    # ... do some training or whatever ...
    state = pipeline.state()
    torch.save(state, "dataset_state.pt")  # The same state is shared across ranks.
    # ... when you need to resume ...)
    pipeline = Conveyer(...)
    pipeline.load_state(torch.load("dataset_state.pt"))
"""

SECOND = """\
from conveyer import Join

imagenet = Conveyer(...)
cifar1k = Conveyer(...)
lsun = Conveyer(...)
pipeline = Join([
    (imagenet, .7),
    (lsun, .25),
    (cifar1k, .05),
])
"""

DECODED = """\
    from PIL import Image
    import numpy as np
    picture = Image.open(all_files[path]).convert("RGB").resize((32, 24))
    return dict(image=torch.from_numpy(np.array(picture)), path=path)"""


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@slow
def test_first_example_runs(output_of: Callable[[str], str], tmp_path: Path) -> None:
    for picture in PICTURES.glob("*.jpg"):
        for copy in range(3):
            shutil.copy(picture, tmp_path / f"{copy}-{picture.name}")
    program = changed(
        FIRST,
        ("from conveyer import", "from shmload.pipeline import"),
        ("import os\n", "import glob\n"),
        ("os.glob('path/to/images/*.jpg')", f"sorted(glob.glob('{tmp_path}/*.jpg'))"),
        ("    return dict(image=None)", DECODED),
        (
            "if __name__ == '__main__':\n",
            f"if __name__ == '__main__':\n    dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n",
        ),
        ('save(state, "dataset_state.pt")', f'save(state, "{tmp_path}/dataset_state.pt")'),
        ('load("dataset_state.pt")', f'load("{tmp_path}/dataset_state.pt")'),
        ("    pipeline = Conveyer(...)\n", "    first = pipeline\n    pipeline = Conveyer(first.stages)\n"),
    )
    program += """
    print(tuple(batch["image"].shape), batch["image"].float().std() > 10)
    print(pipeline()["path"].tolist() == first()["path"].tolist())
    seen = batch["path"].tolist()
    print(len(all_files), len(set(seen)))
    first.close(), pipeline.close()
    dist.destroy_process_group()
"""
    few_cores = "import warnings\nwarnings.filterwarnings('ignore', 'This DataLoader will create 4 worker')\n"
    assert output_of(few_cores + program, warm=True).splitlines() == ["(8, 24, 32, 3) tensor(True)", "True", "24 8"]


@slow
def test_second_example_runs(output_of: Callable[[str], str]) -> None:
    program = "from shmload.pipeline import Collate, Conveyer, Permutation\n" + changed(
        SECOND,
        ("from conveyer import", "from shmload.pipeline import"),
        ("imagenet = Conveyer(...)", "imagenet = Conveyer([Permutation(1000), Collate(2)])"),
        ("cifar1k = Conveyer(...)", "cifar1k = Conveyer([Permutation(1000), Collate(2)])"),
        ("lsun = Conveyer(...)", "lsun = Conveyer([Permutation(1000), Collate(2)])"),
    )
    program += """
members = [(pipeline(), pipeline.last_member)[1] for _ in range(200)]
print([members.count(member) for member in range(3)])
pipeline.close()
"""
    assert output_of(program, warm=True) == "[140, 50, 10]\n"
