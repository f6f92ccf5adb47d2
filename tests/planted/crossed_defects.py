"""Mistakes that stood where two promises meet: each was found in a product whose every promise had its own tests."""

from __future__ import annotations

from tests.planted.planting import Defect

TAR = "tests/formats/tar/test_shard.py::"
RECORDS = "tests/formats/tfrecord/"
BAD_INPUT = "tests/loader/test_bad_input.py::"
WORKERS = "tests/pipeline/test_workers.py::"
INDEXED = "tests/remote/test_indexed.py::"
GENERATIONS = "tests/remote/packing/test_generations.py::"
CONNECTION = "tests/ray/test_connection.py::"
PROXIES = "tests/storage/test_proxies.py::"
MEETING = "tests/shm/test_meeting.py::"

CROSSED_DEFECTS = [
    Defect(
        "N1",
        "text is ordered in chunks, and read whole by the worker of each",
        "shmload/worker/reader.py",
        "    return ReadPlan(path, layout, rule, is_whole=layout.is_ragged, ",
        "    return ReadPlan(path, layout, rule, is_whole=rule is not None and rule.is_certain, ",
        ("tests/batch/test_ragged_fields.py::test_a_batch_of_text_is_read_once_by_one_of_several_workers",),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "what samples draw that are read at once depends on who reads how many of them",
        "shmload/worker/reader.py",
        "            if not drew_for_many():\n",
        "            if samples is not None:\n",
        ("tests/loader/test_read_at_once.py::test_draws_are_the_samples_own",),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "the same without workers",
        "shmload/modes/passes.py",
        "            self._reads_many = not drew_for_many()  #",
        "            #",
        ("tests/loader/test_read_at_once.py::test_draws_are_the_samples_own",),
    ),
    Defect(
        "N1",
        "a group's fields stand in the order of the folder's entries",
        "shmload/formats/columns.py",
        "dict(sorted(found.arrays()))",
        "dict(found.arrays())",
        ("tests/formats/readers/test_zarr.py::test_fields_stand_in_the_order_of_their_names",),
    ),
    Defect(
        "N7",
        "a loader has a public attribute that is no argument",
        "shmload/loader.py",
        "        self._is_closed = False\n        bad_samples",
        "        self.is_closed = self._is_closed = False\n        bad_samples",
        ("tests/loader/test_rebuilt.py::test_public_attributes_are_the_arguments",),
    ),
    Defect(
        "N1",
        "a PAX record may have no length",
        "src/tar_headers.pxi",
        "            if length <= cursor - begin:",
        "            if False:",
        (f"{TAR}test_a_pax_record_of_no_length_is_a_broken_record",),
        ("tar",),
    ),
    Defect(
        "N1",
        "floats are written where the survey found small integers",
        "src/example.pxi",
        "if spec.kind < FLOAT32 or count >",
        "if count >",
        (f"{RECORDS}test_fuzz.py::test_values_that_turn_into_floats_before_they_are_written_stay_within_their_rows",),
        ("records",),
    ),
    Defect(
        "N1",
        "offsets beside a file are added up without a look at where they lie",
        "shmload/formats/tfrecord.py",
        " or offsets.min() < 0 or offsets.max() > size:",
        ":",
        (f"{RECORDS}test_files.py::test_an_index_that_does_not_lie_in_its_file_is_made_anew",),
    ),
    Defect(
        "N1",
        "lengths of runs are added up beyond what there is",
        "src/gather.pyx",
        "        if total <= <uint64_t>out.shape[0]:",
        "        if True:",
        ("tests/core/test_gather.py::test_runs_need_lengths_and_exactly_their_room",),
        ("gather",),
    ),
    Defect(
        "N1",
        "a StopIteration of the user's ends a pass in seed mode",
        "shmload/modes/seed_mode.py",
        "            raise no_end(error, who) from error\n",
        "            raise\n",
        (
            f"{BAD_INPUT}test_stop_iteration_of_the_users_is_no_end_of_a_pass_in_seed_mode",
            f"{BAD_INPUT}test_stop_iteration_of_a_workers_start_is_no_end_of_a_pass_in_seed_mode",
        ),
    ),
    Defect(
        "N1",
        "a StopIteration behind Collate ends a pipeline",
        "shmload/worker/stage_engine.py",
        "        if isinstance(error, StopIteration):  # which would end the items\n",
        "        if False:\n",
        (
            f"{WORKERS}test_stop_iteration_behind_collate_does_not_end_the_pipeline",
            f"{WORKERS}test_stop_iteration_of_a_member_behind_collate_does_not_end_its_epoch_in_a_join",
        ),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "a StopIteration of select ends the samples",
        "shmload/worker/stage_engine.py",
        '        if called(predicate, item, "select"):\n',
        "        try:\n            is_wanted = predicate(item)\n        except StopIteration:\n            return\n        if is_wanted:\n",
        ("tests/remote/test_fluent.py::test_stop_iteration_of_a_function_is_no_end_of_the_samples",),
    ),
    Defect(
        "N1",
        "where a sample lies is told by its end",
        "shmload/remote/layouts.py",
        "    return begin, max(offset + size for _, offset, size in members) - begin\n",
        "    return begin, max(offset + size for _, offset, size in members)\n",
        (
            f"{INDEXED}test_samples_that_find_no_room_are_read_alone_by_their_own_ranges",
            f"{INDEXED}test_a_resume_on_more_ranks_reads_the_rest_through_a_small_cache",
        ),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "a shard in a folder is whole if its size is right",
        "shmload/remote/packing/generation.py",
        "            if crc != wanted:\n",
        "            if False:\n",
        (
            f"{GENERATIONS}test_a_damaged_shard_of_a_finished_packing_is_written_again",
            f"{GENERATIONS}test_a_shard_that_is_not_whole_is_packed_again_with_those_behind_it",
        ),
    ),
    Defect(
        "N1",
        "sending the dataset counts as connecting",
        "shmload/ray/actor_pool.py",
        "            asked_at = self._asked_at if self._joined_at is None else None",
        "            asked_at = self._asked_at",
        (f"{CONNECTION}test_only_the_clusters_answer_has_a_limit_and_what_is_waited_for_is_said",),
    ),
    Defect(
        "N1",
        "an agent that takes another's place asks the cluster once",
        "shmload/ray/actor_pool.py",
        ", is_again=True))",
        "))",
        (f"{CONNECTION}test_an_agent_that_takes_anothers_place_knows_it",),
    ),
    Defect(
        "N1",
        "a proxy is not told who asks for an http server",
        "shmload/storage/transport.py",
        "headers={**headers, **proxy.headers})",
        "headers=dict(headers))",
        (f"{PROXIES}test_a_request_to_an_http_server_is_handed_over_whole",),
    ),
    Defect(
        "N1",
        "a proxy is not told who asks for a tunnel",
        "shmload/storage/transport.py",
        "made.set_tunnel(self.host, self.port, proxy.headers)",
        "made.set_tunnel(self.host, self.port)",
        (f"{PROXIES}test_a_request_to_an_https_server_goes_through_a_tunnel",),
    ),
    Defect(
        "N1",
        "what stands at the place of a meeting is the end of it, whoever put it there",
        "shmload/shm/meeting.py",
        "        open_to_us = [place for place in self._places if all(_others(path) is None for path in place)]\n",
        "        open_to_us = self._places[:1]\n        if any(_others(path) is not None for path in open_to_us[0]):\n"
        "            open_to_us = []\n",
        (f"{MEETING}test_a_board_that_others_may_write_to_is_passed_by",),
    ),
    Defect(
        "N1",
        "an item's error in a pipeline counts positions for batches",
        "shmload/worker/loop.py",
        "batch {self._ring.batch}",
        "batch {self._ring.step}",
        (f"{WORKERS}test_an_items_error_names_its_batch",),
    ),
    Defect(
        "N1",
        "a URL is a pattern that no file matches",
        "shmload/formats/paths.py",
        '        check_local(path, f"{kind}Dataset")\n',
        "",
        ("tests/formats/test_paths.py::test_a_url_is_refused_where_files_are_read_and_the_error_says_what_to_do",),
    ),
    Defect(
        "N1",
        "row groups that all fit the cache are joined for each batch anew",
        "shmload/formats/arrow_tables.py",
        "            if self._num_joined >= self.cache.num_decoded:",
        "            if False:",
        ("tests/formats/readers/test_parquet.py::test_once_all_row_groups_are_there_nothing_is_joined_any_more",),
    ),
    Defect(
        "N1",
        "a forked child waits for a thread of its parent's that was opening",
        "shmload/world.py",
        "        self._locks.setdefault(os.getpid(), Lock()).acquire()\n",
        "        self._locks.setdefault(os.getpid(), next(iter(self._locks.values()), Lock())).acquire()\n",
        ("tests/formats/test_per_process.py::test_a_child_does_not_wait_for_a_thread_that_was_opening[True]",),
    ),
    Defect(
        "N1",
        "ranks of a pipeline that fetched unlike numbers of items together cannot be judged",
        "shmload/tools/audit/timeline.py",
        "    if behind and header.mode == Mode.SEED:",
        "    if behind:",
        ("tests/pipeline/test_audit.py::test_ranks_that_fetched_unlike_numbers_of_items_together_are_proven",),
    ),
    Defect(
        "G1",
        "a forked rank has the program's handlers of crashes",
        "shmload/launch/supervisor.py",
        "    faulthandler.disable()  # what",
        "    # what",
        ("tests/launch/test_spawn.py::test_what_the_program_does_with_a_signal_is_not_the_ranks",),
    ),
]
