"""The defects of pipelines; see defect_list.py."""

from __future__ import annotations

from tests.planted.planting import Defect

STREAM, JOIN, WORKERS = (f"tests/pipeline/test_{name}.py::" for name in ("stream", "join", "workers"))
IN_PLACE = "tests/pipeline/test_in_place.py::"

PIPELINE_DEFECTS = [
    Defect(
        "B2",
        "every epoch has the order of the first",
        "shmload/pipeline/sources.py",
        "schedule.Permutation(self.n_elements, seed=seed, epoch=epoch)",
        "schedule.Permutation(self.n_elements, seed=seed, epoch=0)",
        (f"{STREAM}test_equal_seeds_give_equal_streams_and_other_seeds_others",),
    ),
    Defect(
        "B8",
        "a state forgets what has been had of a block",
        "shmload/pipeline/expanded.py",
        '"counters": [0 if self._over else self._offset]',
        '"counters": [0]',
        ("tests/pipeline/test_expanded.py::test_any_number_of_ranks_goes_on_from_any_step",),
    ),
    Defect(
        "B4",
        "the last step behind a Filter is filled up with its own items, not with the epoch's first",
        "shmload/pipeline/expanded.py",
        "            blocks._move(self._epoch, 0)\n",
        "            blocks._move(self._epoch, self._block - 1)\n",
        ("tests/pipeline/test_expanded.py::test_each_rank_is_given_its_part_of_what_the_stages_make",),
    ),
    Defect(
        "B1",
        "a cache is named without the code of its functions",
        "shmload/pipeline/caching.py",
        "    found = [code.co_code, repr(code.co_names).encode()]\n    for constant in code.co_consts:\n",
        "    found: list[bytes] = []\n    for constant in ():\n",
        ("tests/pipeline/test_caching.py::test_the_code_of_functions_counts",),
    ),
    Defect(
        "B1",
        "a dataset that nothing is done with is asked for its items one by one",
        "shmload/pipeline/stages.py",
        "                return ChosenProgram(self.source)\n",
        "                pass\n",
        (
            f"{IN_PLACE}test_a_dataset_decodes_where_nothing_is_done_with_its_items",
            f"{IN_PLACE}test_ranks_and_resumes_decode_in_place_too",
        ),
    ),
    Defect(
        "B1",
        "what is decoded in place draws by the dataset's index, the same in every epoch",
        "shmload/pipeline/in_place.py",
        "            with keyed_by(indices, keys):\n                read_batch_into(",
        "            with keyed_by(indices, indices):\n                read_batch_into(",
        (f"{IN_PLACE}test_what_items_draw_stays_the_same",),
    ),
    Defect(
        "B1",
        "a sample that is twice in a batch draws the same both times",
        "shmload/pipeline/in_place.py",
        "    return num_indices < len(indices) and num_indices <",
        "    return num_indices > len(indices) and num_indices <",
        (f"{IN_PLACE}test_a_batch_that_has_a_sample_twice_is_read_row_by_row", f"{IN_PLACE}test_what_items_draw_stays_the_same"),
    ),
    Defect(
        "B1",
        "remote shards come in the order of their first epoch in every one",
        "shmload/pipeline/sources.py",
        "self.items.item(place, epoch) if",
        "self.items.item(place, 0) if",
        ("tests/pipeline/test_remote_items.py::test_items_of_a_remote_dataset_come_in_the_datasets_own_order",),
    ),
    Defect(
        "B4",
        "the tail of an epoch is lost by padding",
        "shmload/schedule/schedule.py",
        "(-(-left // world_size), 0) if",
        "(left // world_size, 0) if",
        (
            f"{STREAM}test_each_rank_is_given_its_part_of_the_stream",
            f"{STREAM}test_ranks_are_disjoint_and_complete_as_the_policy_says",
        ),
    ),
    Defect(
        "B7",
        "a rank that has less than others says that the epoch is over",
        "shmload/pipeline/conveyer.py",
        "        return self._position >= self._schedule.end_of(self._epoch, rank=0)\n",
        "        return self._position >= self._schedule.end_of(self._epoch, self._rank)\n",
        ("tests/pipeline/test_state.py::test_a_rank_that_has_less_than_others_saves_a_state_that_loses_nothing",),
    ),
    Defect(
        "B8",
        "a state counts what was fetched together and not asked for",
        "shmload/pipeline/conveyer.py",
        "        self._fetched.extend(outcomes)\n",
        "        self._fetched.extend(outcomes)\n        self._position += len(outcomes) - 1\n",
        (f"{STREAM}test_single_items_that_are_fetched_together_resume_between_any_two",),
    ),
    Defect(
        "B8",
        "a resume forgets how much was ordered together",
        "shmload/pipeline/conveyer.py",
        "            self._iterator = iter(self._loader)\n",
        "            self._stream.rounds_at.clear()\n            self._iterator = iter(self._loader)\n",
        ("tests/pipeline/test_audit.py::test_a_resume_where_the_next_fetch_begins_takes_all_of_what_was_fetched",),
    ),
    Defect(
        "B9",
        "a doubled batch passes for proven",
        "shmload/tools/audit/timeline.py",
        "np.flatnonzero(every[1:] == every[:-1]) + 1",
        "np.flatnonzero(every[1:] < 0) + 1",
        ("tests/pipeline/test_audit.py::test_a_planted_defect_is_found",),
    ),
    Defect(
        "B10",
        "a Join in a Join is worked out from its start",
        "shmload/pipeline/join.py",
        "                yield from source._checked(whole + count, its)\n",
        "                continue\n",
        ("tests/pipeline/test_join_state.py::test_a_conveyer_over_a_nested_join_keeps_the_counters_of_every_depth",),
    ),
    Defect(
        "B11",
        "members begin anew with each epoch of a Join",
        "shmload/pipeline/join.py",
        "        self._epoch += 1\n",
        "        self._epoch += 1\n        [each.begin_next_epoch() for each in self.members]\n",
        (f"{JOIN}test_in_its_next_epoch_the_members_go_on_where_they_stand",),
    ),
    Defect(
        "B12",
        "an item that fails is passed over until another comes",
        "shmload/pipeline/conveyer.py",
        "            items = iterator.next_step()\n",
        "            items = next(iterator)\n",
        (f"{WORKERS}test_an_item_that_ends_its_worker_twice_is_lost_alone_and_at_once",),
    ),
    Defect(
        "B12",
        "a time-out does not name its item",
        "shmload/pipeline/stages.py",
        "        if isinstance(error, SampleTimeout | WorkerDied):\n",
        "        if isinstance(error, WorkerDied):\n",
        (f"{WORKERS}test_an_item_that_takes_too_long_is_lost_with_the_place_it_hung_at",),
    ),
]
