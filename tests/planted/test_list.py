"""Checks that the list of planted defects is complete and up to date; `python -m tests.planted` runs the defects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.planted.defect_list import DEFECTS
from tests.planted.operations import ROOT, PlantingError, omit
from tests.planted.planting import Defect, node_exists

pytestmark = pytest.mark.skipif("SHMLOAD_INSTALLED" in os.environ, reason="an installed package is being tested")


def test_every_requirement_has_a_defect() -> None:
    wanted = {f"R{i}" for i in range(1, 20)} | {"E2", "E3", "E4", "E10"} | {f"B{i}" for i in (2, 4, 7, 8, 9, 10, 11, 12)}
    wanted |= {"A6", "A12", "A15", "A16", "A17", "B1", "G1", "N1", "N5", "N6", "N7", "N8", "N9", "S1", "S4", "S5", "S13"}
    assert wanted == {defect.requirement for defect in DEFECTS}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.requirement} {d.what}")
def test_defect_can_be_planted_and_its_tests_exist(defect: Defect) -> None:
    original = (ROOT / defect.path).read_text()
    assert defect.planted(original) != original
    assert defect.tests
    assert [test for test in defect.tests if not node_exists(test)] == []
    assert bool(defect.modules) == (Path(defect.path).parts[0] == "src")


def test_defect_whose_function_has_changed_is_an_error() -> None:
    where, tests = "test_list:planted", ("tests/some.py::test",)
    twice = Defect("R1", "nothing is checked", where, omit("check()"), tests)
    with pytest.raises(
        PlantingError, match=r"R1, 'nothing is checked': .* the code to be replaced 2 times instead of once: check()"
    ):
        twice.planted("def planted():\n    check()\n    if check(): pass\n")
    assert twice.planted("def planted(): check()\ncheck()\n") == "def planted(): pass\ncheck()\n"


def test_missing_test_of_a_defect_is_an_error() -> None:
    here = "tests/planted/test_list.py::"
    assert node_exists(f"{here}test_every_requirement_has_a_defect")
    assert node_exists(f"{here}test_defect_can_be_planted_and_its_tests_exist[R1 something]")
    assert not node_exists(f"{here}test_of_nothing")
