"""Defects where two promises meet: each was found in a product whose every promise had its own tests."""

from __future__ import annotations

from tests.planted.planting import Defect

CROSSING_DEFECTS = [
    Defect(
        "N1",
        "text is ordered in chunks, and read whole by the worker of each",
        "shmload/worker/read_plan.py",
        "    return ReadPlan(path, layout, rule, is_whole=layout.is_ragged, ",
        "    return ReadPlan(path, layout, rule, is_whole=rule is not None and rule.is_certain, ",
        ("tests/ragged/test_ragged_fields.py::test_a_batch_of_text_is_read_once_by_one_of_several_workers",),
    ),
    Defect(
        "N1",
        "what samples draw that are read at once depends on who reads how many of them",
        "shmload/worker/sample_reader.py",
        "            if not drew_for_many():\n",
        "            if samples is not None:\n",
        ("tests/loader/test_read_at_once.py::test_draws_are_the_samples_own",),
    ),
    Defect(
        "N1",
        "the same without workers",
        "shmload/inline.py",
        "            if drew_for_many():\n",
        "            if not samples:\n",
        ("tests/loader/test_read_at_once.py::test_draws_are_the_samples_own",),
    ),
    Defect(
        "N1",
        "a group's fields stand in the order of the folder's entries",
        "shmload/formats/readers/zarr.py",
        "dict(sorted(found.arrays()))",
        "dict(found.arrays())",
        ("tests/formats/readers/test_zarr.py::test_fields_stand_in_the_order_of_their_names",),
    ),
    Defect(
        "N7",
        "a loader has a public attribute that is no argument",
        "shmload/loader.py",
        "        self._is_closed = False\n        self._last_engine",
        "        self.is_closed = self._is_closed = False\n        self._last_engine",
        ("tests/loader/test_rebuilt.py::test_public_attributes_are_the_arguments",),
    ),
]
