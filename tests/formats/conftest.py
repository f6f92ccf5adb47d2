"""Fixtures of the tests of all formats."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def fuzz(request: pytest.FixtureRequest) -> ModuleType:
    """Returns the module fuzz.py in the folder of the test, which mutates files and reads them."""
    path = Path(request.path).with_name("fuzz.py")
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
