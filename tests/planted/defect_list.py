"""The defects: for each requirement of the product's list at least one mistake that breaks it, and the tests that notice.

A requirement's tests are read off here. Where a node id names a parametrized test, one failing case is enough.
"""

from __future__ import annotations

from tests.planted.crossed_defects import CROSSED_DEFECTS
from tests.planted.engine_defects import ENGINE_DEFECTS
from tests.planted.pipeline_defects import PIPELINE_DEFECTS
from tests.planted.planting import Defect
from tests.planted.sharing_defects import SHARING_DEFECTS
from tests.planted.state_defects import STATE_DEFECTS
from tests.planted.storage_defects import STORAGE_DEFECTS

PROMISES = "tests/loader/test_promises.py::"

DEFECTS = [
    *PIPELINE_DEFECTS,
    *STORAGE_DEFECTS,
    *SHARING_DEFECTS,
    *CROSSED_DEFECTS,
    *ENGINE_DEFECTS,
    *STATE_DEFECTS,
    # ------------------------------------------------ R1: little /dev/shm
    Defect(
        "R1",
        "a segment is not reserved when it is made",
        "shmload/shm/segment.py",
        "        _reserve_first(fd, num_reserved)\n        os.rename(",
        "        os.rename(",
        ("tests/shm/test_segment.py::test_in_64_mib_a_demanded_name_is_refused_with_figures_and_nothing_stays",),
    ),
    Defect(
        "R1",
        "a segment that is interrupted while it is made stays until the process ends",
        "shmload/shm/segment.py",
        "    except BaseException:  # a signal's, too: to reserve takes its time\n",
        "    except OSError:\n",
        ("tests/shm/test_segment.py::test_one_that_is_interrupted_while_it_is_made_leaves_nothing[shm]",),
    ),
    Defect(
        "R1",
        "a ring that /dev/shm has no room for is given up",
        "shmload/shm/segment.py",
        '                if kind == "shm":\n',
        "                if kind:\n",
        ("tests/shm/test_segment.py::test_in_64_mib_a_larger_ring_takes_a_memfd",),
    ),
    # ------------------------------------------------ R2: positions
    Defect(
        "R2",
        "a resume begins its epoch anew",
        "shmload/modes/epochs.py",
        "            epoch, step = resume(state, self._schedule)\n",
        "            epoch, step = resume(state, self._schedule)[0], 0\n",
        (
            "tests/resume/test_seed_mode.py::test_no_consumed_sample_is_read_again",
            "tests/loader/test_seed_mode.py::test_a_resume_goes_on_with_exactly_the_rest",
        ),
    ),
    Defect(
        "R2",
        "a state is more than a kibibyte",
        "shmload/schedule/state.py",
        '        "version": STATE_VERSION,\n        **',
        '        "version": STATE_VERSION,\n        "order": "x" * 1000,\n        **',
        ("tests/schedule/test_state.py::test_the_largest_state_fits_in_a_kibibyte",),
    ),
    Defect(
        "R2",
        "a state waits for workers",
        "shmload/modes/seed_mode.py",
        "        return self.epochs.state_dict(",
        "        while self._engine and not self._engine._is_done(self._engine._queue[-1]):\n"
        "            self._engine._work_once()\n        return self.epochs.state_dict(",
        (f"{PROMISES}test_a_state_is_told_without_asking_any_worker",),
    ),
    Defect(
        "R2",
        "a state goes through the epoch up to its place",
        "shmload/schedule/state.py",
        '        "position": int(schedule.position(step)),\n',
        '        "position": [int(schedule.position(i)) for i in range(step + 200)][step],\n',
        (f"{PROMISES}test_a_state_costs_at_most_50_us_wherever_it_is_taken",),
    ),
    # ------------------------------------------------ R3: elastic
    Defect(
        "R3",
        "the order depends on the number of ranks",
        "shmload/schedule/schedule.py",
        "_permutation(self.n, self.seed, epoch).fill(",
        "_permutation(self.n, self.seed ^ (self.world_size - 1), epoch).fill(",
        (
            "tests/schedule/test_schedule.py::test_global_batches_do_not_depend_on_the_number_of_ranks",
            "tests/resume/test_seed_mode.py::test_global_batches_go_on_at_another_world_size",
        ),
    ),
    # ------------------------------------------------ R4: the packed index
    Defect(
        "R4",
        "a worker keeps each entry it has read",
        "shmload/formats/shared_index.py",
        "    def _slice(self, item: slice) -> SharedIndex:\n",
        "    def __getitem__(self, item):\n"
        "        entry = super().__getitem__(item)\n"
        '        self.__dict__.setdefault("kept", []).append(entry)\n'
        "        return entry\n\n"
        "    def _slice(self, item: slice) -> SharedIndex:\n",
        ("tests/formats/shared_index/test_processes.py::test_a_million_paths_do_not_grow_a_worker_by_10_mib",),
    ),
    # ------------------------------------------------ R5: no unbounded wait
    Defect(
        "R5",
        "nobody looks at the pidfds",
        "shmload/worker/pool.py",
        "        return [Death(worker.worker_id, worker.pid, worker.wait()) for worker in self._children.ended()]\n",
        "        return []\n",
        (
            "tests/faults/test_deadly_samples.py::test_a_death_is_noticed_by_the_next_look_of_a_waiting_trainer",
            "tests/faults/test_torch_mode.py::test_a_dead_worker_is_told_in_torchs_words",
        ),
    ),
    Defect(
        "R5",
        "who dies while it asks for the layout is waited for",
        "src/trainer.pyx",
        "            self._ring.header.layout_state = SHML_LAYOUT_NONE\n",
        "            pass\n",
        ("tests/faults/test_crash_points.py::test_a_death_while_the_layout_is_settled_does_not_show_in_the_stream",),
        ("trainer",),
    ),
    # ------------------------------------------------ R6: replaced workers
    Defect(
        "R6",
        "the first death ends the loader",
        "shmload/engine/supervisor.py",
        "        if self._max_restarts is not None and self._num_restarts >= self._max_restarts:\n",
        "        if True:\n",
        ("tests/faults/test_crash_points.py::test_a_death_in_the_stream_does_not_show_in_it[after_claim-rows]",),
    ),
    Defect(
        "R6",
        "a replacement's randomness is its process's own",
        "shmload/worker/sample_reader.py",
        "        self._reseeds = job.seed_samples and job.seed is not None\n",
        "        self._reseeds = False\n",
        ("tests/faults/test_crash_points.py::test_a_death_in_the_stream_does_not_show_in_it[after_claim-rows]",),
    ),
    Defect(
        "R6",
        "a deadly sample is told without its epoch",
        "shmload/worker/failure.py",
        "of epoch {epoch} (row {row} of batch {step})",
        "(row {row} of batch {step})",
        ("tests/faults/test_deadly_samples.py::test_the_epoch_is_named_and_counts_for_itself",),
    ),
    # ------------------------------------------------ R7: nothing stays
    Defect(
        "R7",
        "the reaper shares the trainer's process group",
        "shmload/shm/reaper.py",
        "            start_new_session=True,\n",
        "",
        ("tests/shm/test_leftovers.py::test_nothing_stays_when_the_owner_is_killed",),
    ),
    Defect(
        "R7",
        "workers do not watch their trainer",
        "shmload/worker/process.py",
        "    die_with(post.trainer_pid)\n",
        "",
        ("tests/faults/test_killed_with_reaper.py::test_workers_end_with_their_trainer_although_its_reaper_is_gone",),
    ),
    Defect(
        "R7",
        "a living neighbor's lock is not believed",
        "shmload/shm/janitor.py",
        "nobody is declared dead\n        return True\n",
        "nobody is declared dead\n        return False\n",
        ("tests/shm/test_leftovers.py::test_a_living_neighbor_is_never_swept",),
        reaches_out=True,
    ),
    Defect(
        "R7",
        "workers that are still starting when the trainer is killed are left alone",
        "shmload/shm/reaper.py",
        ' && kill -9 "${{worker%:*}}"\n',
        "\n",
        ("tests/shm/test_leftovers.py::test_workers_that_do_not_end_by_themselves_are_killed_and_no_other_process",),
    ),
    # ------------------------------------------------ R8: many fields
    Defect(
        "R8",
        "each field takes a descriptor",
        "shmload/batch/deliver.py",
        "    plan, nbytes, viewed = _plan(layout, nrows)\n",
        '    plan, nbytes, viewed = _plan(layout, nrows)\n    [__import__("os").memfd_create("a field") for _ in plan]\n',
        (f"{PROMISES}test_descriptors_are_the_same_for_any_number_of_fields",),
    ),
    Defect(
        "R8",
        "each field is copied out by itself",
        "shmload/batch/deliver.py",
        "        return lease.tensors(plan, from_dlpack, names), nbytes\n",
        "        return copied(lease.tensors(plan, from_dlpack, names)), nbytes\n",
        ("tests/engine/test_no_copies.py::test_yielded_tensors_lie_in_the_ring[dataset0]",),
    ),
    # ------------------------------------------------ R9: equal batch counts
    Defect(
        "R9",
        "padding is left out",
        "shmload/schedule/stream_positions.py",
        ' if uneven == "pad" else divmod',
        " if False else divmod",
        (
            "tests/schedule/test_schedule.py::test_ranks_have_equally_many_steps_and_rows_unless_exact",
            "tests/loader/test_seed_mode.py::test_padding_is_said",
        ),
    ),
    # ------------------------------------------------ R10: start and epochs
    Defect(
        "R10",
        "the dataset is pickled for each worker",
        "shmload/worker/pool.py",
        "        pickled_job: bytes | None = pickled_once(called.job, modules)\n",
        "        pickled_job: bytes | None = [pickled_once(called.job, modules) for _ in posts][0]\n",
        (f"{PROMISES}test_the_dataset_is_pickled_once_for_all_workers",),
    ),
    Defect(
        "R10",
        "workers are started one after the other",
        "shmload/worker/pool.py",
        "                self._start(post)\n",
        "                self._start(post)\n                self._children.wait(25.0)\n",
        (f"{PROMISES}test_workers_start_at_the_same_time",),
    ),
    Defect(
        "R10",
        "workers stand still at the end of an epoch",
        "shmload/modes/seed_mode.py",
        "            else:\n                self._cursor = (epoch + 1, 0)\n",
        "            else:\n                return\n",
        (f"{PROMISES}test_workers_read_into_the_next_epoch_before_it_begins",),
    ),
    # ------------------------------------------------ R11: slow samples
    Defect(
        "R11",
        "a batch is one worker's",
        "src/orders.pxi",
        "cdef uint32_t most = min(4 * <uint32_t>self._ring.header.num_wanted, ",
        "cdef uint32_t most = min(1, ",
        (f"{PROMISES}test_all_workers_read_the_rows_of_one_batch",),
        ("trainer",),
    ),
    Defect(
        "R11",
        "one batch is ordered at a time",
        "shmload/modes/seed_mode.py",
        "        num_missing = self._num_ahead - engine.num_queued\n",
        "        num_missing = 1 - engine.num_queued\n",
        (
            f"{PROMISES}test_a_slow_sample_does_not_keep_other_slots_from_filling",
            f"{PROMISES}test_workers_read_into_the_next_epoch_before_it_begins",
        ),
    ),
    # ------------------------------------------------ R12: the epoch travels with its order
    Defect(
        "R12",
        "a worker keeps the epoch of its first order",
        "shmload/worker/sample_reader.py",
        "        return self._job.seed, ring.epoch, ",
        '        return self._job.seed, self.__dict__.setdefault("epoch", ring.epoch), ',
        (
            f"{PROMISES}test_persistent_workers_know_the_epoch_of_every_order",
            "tests/loader/test_seed_mode.py::test_batches_do_not_depend_on_who_makes_them",
        ),
    ),
    # ------------------------------------------------ R13: a budget in bytes
    Defect(
        "R13",
        "cgroups are not asked",
        "shmload/shm/free_memory.py",
        "    return min([free_memory_bytes(root), *(cgroup.rest for cgroup in memory_cgroups(root))])\n",
        "    return free_memory_bytes(root)\n",
        (
            "tests/shm/test_preflight.py::test_a_v2_limit_counts_less_what_is_used_and_cannot_be_dropped",
            "tests/shm/test_preflight.py::test_a_v1_limit_counts",
        ),
    ),
    Defect(
        "R13",
        "ring_bytes limits nothing",
        "shmload/engine/ring_memory.py",
        "        if self._limit is not None and self.nbytes + nbytes > self._limit:\n",
        "        if False:\n",
        ("tests/loader/test_bad_input.py::test_a_ring_larger_than_allowed_is_refused_with_figures",),
    ),
    # ------------------------------------------------ R14: on_error
    Defect(
        "R14",
        "bad samples are not counted",
        "shmload/engine/bad_samples.py",
        "        self.count += 1\n",
        "",
        (
            "tests/loader/test_policies.py::test_skipping_makes_the_batch_shorter",
            "tests/loader/test_policies.py::test_more_bad_samples_than_allowed_end_it",
        ),
    ),
    Defect(
        "R14",
        "the substitute is another than the order says",
        "shmload/engine/bad_samples.py",
        "self.next_index(order, first_row, tries + 1)",
        "self.next_index(order, first_row, tries + 2)",
        ("tests/loader/test_policies.py::test_the_next_of_the_same_permutation_stands_in",),
    ),
    Defect(
        "R14",
        "max_bad caps nothing",
        "shmload/engine/bad_samples.py",
        "        if self._max_bad is not None and self.count > self._max_bad:\n",
        "        if False:\n",
        ("tests/loader/test_policies.py::test_more_bad_samples_than_allowed_end_it",),
    ),
    # ------------------------------------------------ R15: sample_timeout_s
    Defect(
        "R15",
        "the stack of the stuck worker is left out",
        "shmload/worker/failure.py",
        r"Its stack:\n{stack}\n",
        r"",
        ("tests/loader/test_policies.py::test_a_sample_that_takes_too_long_ends_with_the_stack_of_its_worker",),
    ),
    Defect(
        "R15",
        "no sample is ever late",
        "shmload/engine/supervisor.py",
        "/ 1e9 > (self._sample_timeout_s or 0)\n",
        "/ 1e9 > 1e9\n",
        ("tests/loader/test_policies.py::test_late_samples_may_be_skipped",),
    ),
    Defect(
        "R15",
        "the first of the samples that are read at once is to blame for all",
        "shmload/worker/sample_reader.py",
        "        if count > 1:\n",
        "        if False:\n",
        (
            "tests/loader/test_policies_under_fault.py::test_of_samples_that_are_read_at_once_the_one_that_takes_too_long_is_named[None]",
        ),
    ),
    Defect(
        "R14",
        "the row that is waited for is to blame for a death among rows that threads read",
        "shmload/engine/supervisor.py",
        "        if self._num_threads > 1 and not self._kills[of_batch]:\n",
        "        if False:\n",
        ("tests/loader/test_policies_under_fault.py::test_a_good_sample_that_is_read_beside_a_deadly_one_again_and_again_stays",),
    ),
    Defect(
        "R14",
        "a batch that is ordered again is to blame for the deaths of before",
        "shmload/engine/supervisor.py",
        "self._work_of(order, -1), number\n",
        "self._work_of(order, -1), 0\n",
        ("tests/loader/test_policies_under_fault.py::test_two_deadly_samples_of_one_batch_are_substituted[bad1-first1-4]",),
    ),
    Defect(
        "R6",
        "rows whose worker has died are read at once again",
        "shmload/worker/loop.py",
        "        if ring.is_suspect:\n",
        "        if False:\n",
        (
            "tests/loader/test_policies_under_fault.py::test_of_samples_that_are_read_at_once_only_the_bad_one_is_skipped[5-kills-Rows]",
        ),
    ),
    Defect(
        "R15",
        "the first of the samples that an actor reads at once is to blame for all",
        "shmload/ray/sample_timer.py",
        '"", "", () if is_several else (row,))',
        '"", "", (max(row, 0),))',
        ("tests/ray/test_lateness.py::test_of_late_samples_that_are_read_at_once_none_is_named[False]",),
    ),
    Defect(
        "R6",
        "rows that an actor has ended over are read at once again",
        "shmload/ray/local_ring.py",
        "        if is_suspect:  #",
        "        if False:  #",
        ("tests/ray/test_decoder.py::test_rows_that_an_actor_has_ended_over_are_read_one_by_one[AtOnce]",),
    ),
    Defect(
        "E10",
        "an order of samples beyond the dataset is taken",
        "shmload/engine/argument_checks.py",
        "    _check_orders(given)\n",
        "",
        ("tests/loader/test_bad_input.py::test_an_order_of_samples_beyond_the_dataset_is_refused[weights-4]",),
    ),
    # ------------------------------------------------ R16: what cannot travel
    Defect(
        "R16",
        "what cannot be pickled is not named",
        "shmload/worker/job_pickling.py",
        'for path, value in culprits) or "the dataset"',
        'for path, value in ()) or "the dataset"',
        ("tests/loader/test_bad_input.py::test_what_cannot_be_pickled_is_named_by_its_path",),
    ),
    Defect(
        "R16",
        "a fork beside CUDA and threads is not spoken of",
        "shmload/worker/pool.py",
        "        warn_of_fork()\n",
        "        pass\n",
        (
            f"{PROMISES}test_a_fork_of_a_process_that_uses_cuda_is_warned_of",
            f"{PROMISES}test_a_fork_beside_running_threads_is_told_once",
        ),
    ),
    # ------------------------------------------------ R17: samples that do not fit
    Defect(
        "R17",
        "a sample of another shape leaves its row as it was",
        "shmload/worker/loop.py",
        "            if not placer.put(sample, row):\n",
        "            if not placer.put(sample, row) and False:\n",
        ("tests/loader/test_bad_input.py::test_in_torch_mode_a_sample_of_another_shape_is_refused_in_torchs_words",),
    ),
    Defect(
        "R17",
        "a batch larger than its slot gets no more room",
        "shmload/engine/ring_memory.py",
        "        self._has_grown = True\n        if self._has_payload:\n            self.ensure(slot, nbytes)\n",
        "        self._has_grown = True\n        if self._has_payload:\n            pass\n",
        ("tests/loader/test_growth.py::test_batches_that_grow_come_right_and_old_room_is_given_up",),
    ),
    # ------------------------------------------------ R18: damaged files
    Defect(
        "R18",
        "a .npy file may be shorter than its head says",
        "shmload/formats/arrays.py",
        "    if offset + needed > nbytes:\n",
        "    if False:\n",
        ("tests/formats/arrays/test_arrays.py::test_any_damage_to_a_head_is_an_error_or_another_array",),
    ),
    Defect(
        "R18",
        "numbers of several types come as a list",
        "shmload/batch/collate.py",
        "        if all(isinstance(value, _ANY_NUMBER) for value in values):\n",
        "        if False:\n",
        (
            "tests/batch/test_every_kind.py::test_numbers_of_several_types_and_of_subclasses_are_the_tensor_that_torch_makes[int, float]",
        ),
    ),
    Defect(
        "R18",
        "the file whose array cannot be rows is not named",
        "shmload/formats/arrays.py",
        '                raise type(error)(f"{place.path}: {error}") from None\n',
        "                raise\n",
        ("tests/formats/arrays/test_arrays.py::test_an_array_that_cannot_be_rows_is_refused_with_the_name_of_its_file",),
    ),
    Defect(
        "R18",
        "an index is believed whatever it says",
        "shmload/formats/tfrecord/record_file.py",
        ' or len(body) % 8 or said != {**self._identity, "crc32c": crc32c(body)}:\n',
        " or len(body) % 8:\n",
        (
            "tests/formats/tfrecord/test_files.py::test_an_index_of_the_file_as_it_was_is_made_anew",
            "tests/formats/tfrecord/test_files.py::test_a_damaged_index_is_made_anew",
        ),
    ),
    Defect(
        "R18",
        "the checksum of a record is not compared",
        "src/records.pyx",
        "            if stored != crc_masked(crc):\n",
        "            if False:\n",
        ("tests/formats/tfrecord/test_round_trip.py::test_any_changed_byte_and_any_cut_is_detected",),
        ("records",),
    ),
    Defect(
        "R18",
        "the checksum of a tar header is not compared",
        "src/tar_headers.pxi",
        "        if not _sum_holds(block):\n",
        "        if False:\n",
        ("tests/formats/tar/test_shard.py::test_every_flipped_bit_of_a_header_is_an_error_or_changes_nothing",),
        ("tar",),
    ),
    Defect(
        "R18",
        "libjpeg's warnings of damaged data are let pass",
        "src/jpeg_guard.h",
        "    if (guard->strictness == JPEG_STRICT || (guard->strictness == JPEG_WHOLE && !jpeg_is_remark(text)))\n",
        "    if (0)\n",
        (
            "tests/formats/images/test_jpeg.py::test_damage_above_or_within_a_part_is_refused_and_below_it_is_not_looked_at",
            "tests/formats/images/test_jpeg.py::test_what_follows_the_last_row_is_looked_at_with_the_last_row",
        ),
        ("jpeg",),
    ),
    Defect(
        "R18",
        "bytes before a restart marker pass for harmless",
        "src/jpeg_guard.h",
        "        return marker < 0xD0 || marker > 0xD7;\n",
        "        return 1;\n",
        ("tests/formats/images/test_irregular.py::test_bytes_before_a_restart_marker_are_damage",),
        ("jpeg",),
    ),
    Defect(
        "R18",
        "the pixels of a PNG with wrong checksums are not checked",
        "shmload/formats/images/open_image.py",
        "                check_pixels(data)\n",
        "",
        ("tests/formats/images/test_irregular.py::test_what_pillow_refuses_of_a_png_is_refused_and_pixels_are_never_wrong",),
    ),
    Defect(
        "R18",
        "a TIFF that Pillow has turned is turned once more",
        "shmload/formats/images/pillow_image.py",
        "            self.picture.load()  # as `exif_transpose` does: a TIFF is turned by that, and a PNG may have its EXIF at the end\n",
        "            pass\n",
        ("tests/formats/images/test_upright.py::test_every_kind_of_file_is_turned_as_pillow_turns_it",),
    ),
    Defect(
        "R18",
        "of a JPEG only EXIF says how it is turned",
        "shmload/formats/images/open_image.py",
        'for sign in (b"Exif", b"tiff:Orientation")',
        'for sign in (b"Exif",)',
        ("tests/formats/images/test_upright.py::test_every_kind_of_file_is_turned_as_pillow_turns_it",),
    ),
    Defect(
        "R18",
        "workers do not tell of files that break a rule",
        "shmload/worker/loop.py",
        "num_irregular=irregular_files.value - num_irregular)",
        "num_irregular=0)",
        ("tests/formats/images/test_irregular.py::test_stats_count_the_images_that_break_a_rule",),
    ),
    Defect(
        "R18",
        "a lossless JPEG goes to the library that cannot make it RGB",
        "shmload/formats/images/open_image.py",
        "header.num_components in (1, 3) and not is_lossless",
        "header.num_components in (1, 3)",
        ("tests/formats/images/test_irregular.py::test_a_lossless_jpeg_is_decoded_or_clearly_refused",),
    ),
    Defect(
        "R18",
        "an iterable dataset that has a length is taken for a map-style one",
        "shmload/tools/named.py",
        ' and hasattr(candidate, "__getitem__") and not is_iterable(candidate)',
        ' and hasattr(candidate, "__getitem__")',
        ("tests/bench/test_spec.py::test_an_iterable_dataset_is_one_too_even_if_it_has_a_length",),
    ),
    Defect(
        "R18",
        "restart markers are counted whatever their numbers",
        "src/jpeg_cut.h",
        "        if (at[-1] != (number + 1 == layout->num_intervals ? JPEG_EOI : JPEG_RST0 + number % 8))\n",
        "        if (number + 1 == layout->num_intervals ? at[-1] != JPEG_EOI : (at[-1] & 0xF8) != JPEG_RST0)\n",
        ("tests/formats/images/test_restart_reading.py::test_where_markers_are_not_as_they_should_be_the_file_is_read_in_order",),
        ("jpeg",),
    ),
    # ------------------------------------------------ R19: no pickle from remote data
    Defect(
        "R19",
        "pickles of a shard are opened unasked",
        "shmload/formats/tar/members.py",
        "            return _UNSAFE[last] if self._allow_pickle else None\n",
        "            return _UNSAFE[last]\n",
        ("tests/formats/tar/test_decoders.py::test_what_could_run_code_stays_bytes_until_asked_for",),
    ),
    # ------------------------------------------------ E4: leases
    Defect(
        "E4",
        "a tensor does not hold its slot",
        "src/lease.h",
        "    atomic_fetch_add_explicit(&lease->refs, 1, memory_order_relaxed);\n    return managed;\n",
        "    return managed;\n",
        ("tests/engine/test_aliases.py::test_an_alias_keeps_its_slot_until_it_dies",),
        ("trainer",),
    ),
    Defect(
        "E4",
        "what is copied out still lies in the ring",
        "shmload/batch/deliver.py",
        "        return tensor.clone()\n",
        "        return tensor\n",
        ("tests/engine/test_copy_out.py::test_a_list_of_the_loader_is_right_and_warns_once_naming_the_slots",),
    ),
]
