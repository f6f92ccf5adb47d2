"""Names whose optional package is not installed can be imported if possible, and errors name the extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in list(sys.modules):
        if module.startswith(("shmload.formats.ray_", "shmload.integrations.")):
            package, _, name = module.rpartition(".")
            monkeypatch.setattr(sys.modules[package], name, sys.modules[module])  # so that the test's end restores it
            monkeypatch.delitem(sys.modules, module)  # imported anew
    for package in ("accelerate", "pyarrow", "ray"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("name", ["RayDataset", "RayStream"])
def test_dataset_is_imported_without_its_package_and_its_constructor_names_the_extra(name: str) -> None:
    kind = getattr(importlib.import_module("shmload.formats.ray_blocks"), name)
    with pytest.raises(ModuleNotFoundError, match=r"the package pyarrow is needed .* pip install 'shmload\[ray\]'"):
        kind(None)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(("package", "extra"), [("accelerate", "integrations"), ("ray", "ray")])
def test_integration_without_its_package_names_the_extra(package: str, extra: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"the package {package} is needed .* pip install 'shmload\[{extra}\]'"):
        importlib.import_module(f"shmload.integrations.{package}")
