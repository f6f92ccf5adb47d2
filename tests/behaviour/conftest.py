"""The tests here, and the processes they spawn, can import `behaviour_kit`; the host's number of cores changes nothing."""

from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("tests.behaviour.behaviour_kit")


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch advises against more workers than cores; one test asks for that advice."""
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 64)
