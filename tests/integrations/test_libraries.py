"""The libraries of docs/frameworks.md: each section's program prints the output shown, in the environment of its library.

No library is in the dev extra. Some are in `libraries`; those that need torchvision or many dependencies are installed by hand:

    pip install -e '.[libraries]' torchio fastai && pip install --no-deps torchvision timm ultralytics ultralytics-thop
    python -m pytest tests/integrations/test_libraries.py
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow(reason="imports large libraries and starts their workers"), pytest.mark.timeout(300)]
PAGE = next(p for p in Path(__file__).parents if (p / "docs").exists()) / "docs" / "frameworks.md"
INTRODUCTION, *SECTIONS = PAGE.read_text().partition("\n## Libraries with their own loader\n")[2].split("\n### ")
PACKAGES = {  # title of a section -> what its program imports
    "PyTorch Geometric": ["torch_geometric"],
    "timm": ["timm", "torchvision"],
    "albumentations": ["albumentations"],
    "MONAI": ["monai"],
    "ultralytics": ["ultralytics", "torchvision"],
    "torchio": ["torchio"],
    "Ignite": ["ignite"],
    "fastai": ["fastai", "torchvision"],
}
# PyPI's torchvision is built for a CUDA build of torch; with another one its operators are missing and it cannot be imported.
TORCHVISION = """
import sys

import torch

try:
    import torchvision
except RuntimeError:
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""
# The base class of NeighborLoader, with a sampler that needs no compiled library.
NODES = """
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from shmload import ShmLoader


class OneNeighbor(BaseSampler):
    edge_permutation = None

    def __init__(self, edges):
        self.edges = edges

    def sample_from_nodes(self, inputs, **_):
        edges = [torch.nonzero(self.edges[1] == node)[:, 0] for node in inputs.node.tolist()]
        edges = torch.stack([found[torch.randint(len(found), ())] for found in edges])
        nodes, count = torch.cat([inputs.node, self.edges[0, edges]]), len(edges)
        rows, columns = torch.arange(count, 2 * count), torch.arange(count)
        return SamplerOutput(node=nodes, row=rows, col=columns, edge=edges, batch=None, metadata=(inputs.input_id, inputs.time))

    def sample_from_edges(self, inputs, **_):
        raise NotImplementedError


class NodeShmLoader(NodeLoader, ShmLoader):
    pass


count = 50
edges = torch.stack([torch.arange(4 * count) % count, torch.arange(4 * count) * 7 // 4 % count])
data = Data(x=torch.rand(count, 2), edge_index=edges, y=torch.arange(count))
for filter_per_worker in (False, True):
    options = {"batch_size": 8, "shuffle": True, "num_workers": 2, "filter_per_worker": filter_per_worker}
    options["node_sampler"] = OneNeighbor(edges)
    theirs, ours = NodeLoader(data, **options), NodeShmLoader(data, **options)
    assert len(epochs(theirs)) == 14
    assert epochs(theirs) == epochs(ours)
    seeded = [epochs(NodeShmLoader(data, **options | {"num_workers": number}, seed=7)) for number in (0, 2)]
    assert seeded[0] == seeded[1] != epochs(ours)
    assert seeded[0][0][0] == "Data", seeded[0][0]
"""


def code_of(section: str) -> str:
    """Returns the lines that every program begins with, followed by a section's."""
    return "".join("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for text in (INTRODUCTION, section))


@pytest.fixture
def require_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Returns a function that skips the test if a section's library is missing. Libraries that write to the home folder get a
    temporary one.
    """
    for variable in ("YOLO_CONFIG_DIR", "FASTAI_HOME", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("YOLO_VERBOSE", "false")  # otherwise it prints where its settings are
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def check(title: str) -> None:
        missing = [name for name in PACKAGES[title] if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}; the docstring of {Path(__file__).name} says how to install them")

    return check


def test_every_section_has_an_entry_in_packages() -> None:
    assert [section.partition("\n")[0] for section in SECTIONS] == list(PACKAGES)


@pytest.mark.parametrize("section", SECTIONS, ids=list(PACKAGES))
def test_program_of_a_section_prints_what_the_page_shows(
    section: str, require_library: Callable[[str], None], output_of: Callable[..., str]
) -> None:
    title = section.partition("\n")[0]
    require_library(title)
    (expected,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    preamble = TORCHVISION if "torchvision" in PACKAGES[title] else ""
    assert expected == output_of(preamble + code_of(section), strict=False, deadline_s=240, warm=True)


def test_nodes_and_neighbors_equal_those_of_the_librarys_loader(
    require_library: Callable[[str], None], output_of: Callable[..., str]
) -> None:
    require_library("PyTorch Geometric")
    output_of(code_of("") + NODES, strict=False, deadline_s=240, warm=True)


def test_ultralytics_endless_iterator_is_one_epoch_in_seed_mode(
    require_library: Callable[[str], None], output_of: Callable[..., str]
) -> None:
    require_library("ultralytics")
    program = """
from shmload import ShmLoader
from ultralytics.data.build import InfiniteDataLoader

loader = type("Both", (InfiniteDataLoader, ShmLoader), {})(range(8), batch_size=4, num_workers=1, seed=7)
print([len(batch) for batch in loader])
try:
    list(loader)
except RuntimeError as error:
    print(error)
"""
    assert output_of(TORCHVISION + program, strict=False, deadline_s=240, warm=True) == "[4, 4]\ngenerator raised StopIteration\n"
