"""The list of planted defects: at least one mistake for each requirement, and the tests that detect it.

It also shows which tests belong to a requirement. If a node id names a parametrized test, one failing case is enough.
"""

from __future__ import annotations

from tests.planted.crossed_defects import CROSSED_DEFECTS
from tests.planted.engine_defects import ENGINE_DEFECTS
from tests.planted.operations import Replace, omit
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
        "a segment is not reserved when it is created",
        "_create_named",
        omit("_reserve_first(fd, num_reserved)"),
        ("tests/shm/test_segment.py::test_named_segment_larger_than_dev_shm_is_refused_with_figures",),
    ),
    Defect(
        "R1",
        "an interrupted creation leaves its segment until the process ends",
        "_create_named",
        Replace("BaseException", "OSError"),
        ("tests/shm/test_segment.py::test_interrupted_creation_leaves_nothing[shm]",),
    ),
    Defect(
        "R1",
        "a ring that does not fit in /dev/shm is refused",
        "Segment.create",
        Replace('kind == "shm"', "kind"),
        ("tests/shm/test_segment.py::test_ring_larger_than_dev_shm_uses_a_memfd",),
    ),
    # ------------------------------------------------ R2: positions
    Defect(
        "R2",
        "a resume starts its epoch again",
        "Epochs.load_state_dict",
        Replace("resume(state, self._schedule, self._order_of_dataset)", "resume(state, self._schedule)[0], 0"),
        (
            "tests/resume/test_seed_mode.py::test_no_consumed_sample_is_read_again",
            "tests/loader/test_seed_mode.py::test_resume_continues_with_exactly_the_rest",
        ),
    ),
    Defect(
        "R2",
        "a state is larger than a kibibyte",
        "make_state",
        Replace(
            '{ "version": STATE_VERSION, **_identity(schedule), "epoch": int(epoch), "position": int(schedule.position(step)), }',
            '{ "version": STATE_VERSION, "order": "x" * 1000, **_identity(schedule), "epoch": int(epoch), "position": int(schedule.position(step)), }',
        ),
        ("tests/schedule/test_state.py::test_largest_state_fits_in_a_kibibyte",),
    ),
    Defect(
        "R2",
        "a state waits for workers",
        "SeedStream.state_dict",
        Replace(
            "return self.epochs.state_dict(*self._position(), is_begun=self._place is not None)",
            "while self._engine and not self._engine._is_done(self._engine._queue[-1]):\n    self._engine._work_once()\nreturn self.epochs.state_dict(*self._position(), is_begun=self._place is not None)",
        ),
        (f"{PROMISES}test_state_is_available_without_asking_workers",),
    ),
    Defect(
        "R2",
        "taking a state iterates over the epoch up to its position",
        "make_state",
        Replace("int(schedule.position(step))", "[int(schedule.position(i)) for i in range(step + 2000)][step]"),
        (f"{PROMISES}test_state_costs_at_most_50_us_wherever_it_is_taken",),
    ),
    # ------------------------------------------------ R3: elastic
    Defect(
        "R3",
        "the order depends on the number of ranks",
        "Schedule._take",
        Replace("_permutation(self.n, self.seed, epoch)", "_permutation(self.n, self.seed ^ (self.world_size - 1), epoch)"),
        (
            "tests/schedule/test_schedule.py::test_global_batches_do_not_depend_on_the_number_of_ranks",
            "tests/resume/test_seed_mode.py::test_global_batches_resume_with_another_world_size",
        ),
    ),
    # ------------------------------------------------ R4: the packed index
    Defect(
        "R4",
        "a worker keeps each entry it has read",
        "shmload/formats/shared_index/shared_index.py",
        Replace(
            "    def _slice(self, item: slice) -> SharedIndex:",
            '    def __getitem__(self, item):\n        entry = super().__getitem__(item)\n        self.__dict__.setdefault("kept", []).append(entry)\n        return entry\n\n    def _slice(self, item: slice) -> SharedIndex:',
        ),
        ("tests/formats/shared_index/test_processes.py::test_worker_that_reads_a_million_paths_grows_by_less_than_10_mib",),
    ),
    # ------------------------------------------------ R5: no unbounded wait
    Defect(
        "R5",
        "pidfds are not watched",
        "ProcessPool.deaths",
        Replace("[Death(worker.worker_id, worker.pid, worker.wait()) for worker in self._children.ended()]", "[]"),
        (
            "tests/faults/test_deadly_samples.py::test_waiting_trainer_notices_a_death_at_its_next_check",
            "tests/faults/test_torch_mode.py::test_error_of_a_dead_worker_is_torchs",
        ),
    ),
    Defect(
        "R5",
        "the trainer waits for a worker that died while it requested the layout",
        "src/trainer.pyx",
        Replace("            self._ring.header.layout_state = SHML_LAYOUT_NONE\n", "            pass\n"),
        ("tests/faults/test_crash_points.py::test_stream_is_identical_after_a_death_during_the_layout",),
        ("trainer",),
    ),
    # ------------------------------------------------ R6: replaced workers
    Defect(
        "R6",
        "the first death ends the loader",
        "Supervisor.handle",
        Replace("self._restarts.num_left == 0", "True"),
        ("tests/faults/test_crash_points.py::test_stream_is_identical_after_deaths_during_batches[after_claim-rows]",),
    ),
    Defect(
        "R6",
        "each engine of a loader may replace max_restarts workers",
        "EngineBuilder.make",
        Replace("restarts=self._restarts", "restarts=RestartLimit(config)"),
        ("tests/loader/test_policies_under_fault.py::test_restarts_of_all_passes_count_against_max_restarts",),
    ),
    Defect(
        "R6",
        "the randomness of a replacement depends on its process",
        "SampleReader.__init__",
        Replace("job.seed_samples and job.seed is not None", "False"),
        ("tests/faults/test_crash_points.py::test_stream_is_identical_after_deaths_during_batches[after_claim-rows]",),
    ),
    Defect(
        "R6",
        "a deadly sample is reported without its epoch",
        "sample_at",
        Replace(
            'f"sample {key!s:.200} of epoch {epoch} (row {row} of batch {step})"',
            'f"sample {key!s:.200} (row {row} of batch {step})"',
        ),
        ("tests/faults/test_deadly_samples.py::test_deaths_are_counted_and_reported_per_epoch",),
    ),
    # ------------------------------------------------ R7: nothing stays
    Defect(
        "R7",
        "the reaper is in the trainer's process group",
        "_start",
        Replace("start_new_session=True", ""),
        ("tests/shm/test_leftovers.py::test_nothing_remains_when_the_owner_is_killed",),
    ),
    Defect(
        "R7",
        "workers do not watch their trainer",
        "process:main",
        omit("die_with(link.trainer_pid)"),
        ("tests/faults/test_killed_with_reaper.py::test_workers_end_with_their_trainer_even_without_its_reaper",),
    ),
    Defect(
        "R7",
        "the lock of a live neighbor is ignored",
        "_is_locked",
        Replace("not lock.try_acquire()", "lock.try_acquire() is None"),
        ("tests/shm/test_leftovers.py::test_live_group_is_never_swept",),
        reaches_out=True,
    ),
    Defect(
        "R7",
        "workers that are still starting when the trainer is killed are not ended",
        "shmload/shm/reaper.py",
        Replace(' && kill -9 "${{worker%:*}}"', ""),
        ("tests/shm/test_leftovers.py::test_only_workers_that_do_not_end_by_themselves_are_killed",),
    ),
    # ------------------------------------------------ R8: many fields
    Defect(
        "R8",
        "each field takes a descriptor",
        "deliver_rows",
        Replace(
            "plan, nbytes, viewed = _plan(layout, nrows)",
            'plan, nbytes, viewed = _plan(layout, nrows)\n[__import__("os").memfd_create("a field") for _ in plan]',
        ),
        (f"{PROMISES}test_descriptors_are_the_same_for_any_number_of_fields",),
    ),
    Defect(
        "R8",
        "each field is copied out separately",
        "deliver_rows",
        Replace("lease.tensors(plan, from_dlpack, names)", '__import__("copy").deepcopy(lease.tensors(plan, from_dlpack, names))'),
        ("tests/engine/test_no_copies.py::test_yielded_tensors_are_in_the_ring[dataset0]",),
    ),
    # ------------------------------------------------ R9: equal batch counts
    Defect(
        "R9",
        "padding is left out",
        "stream_positions:rows_of",
        Replace('uneven == "pad"', "False"),
        (
            "tests/schedule/test_schedule.py::test_ranks_have_equal_numbers_of_steps_and_rows_unless_exact",
            "tests/loader/test_seed_mode.py::test_padding_is_reported",
        ),
    ),
    # ------------------------------------------------ R10: start and epochs
    Defect(
        "R10",
        "the dataset is pickled for each worker",
        "process_pool",
        Replace("pickled_once(prepared.job, modules)", "[pickled_once(prepared.job, modules) for _ in links][0]"),
        (f"{PROMISES}test_dataset_is_pickled_once_for_all_workers",),
    ),
    Defect(
        "R10",
        "workers are started one after the other",
        "ProcessPool.start",
        Replace("self._start(link)", "self._start(link)\nself._children.wait(25.0)"),
        (f"{PROMISES}test_workers_start_at_the_same_time",),
    ),
    Defect(
        "R10",
        "workers stop at the end of an epoch",
        "SeedStream._fill",
        Replace("self._cursor = (epoch + 1, 0)", "return"),
        (f"{PROMISES}test_workers_read_into_the_next_epoch_before_it_begins",),
    ),
    # ------------------------------------------------ R11: slow samples
    Defect(
        "R11",
        "a batch is filled by a single worker",
        "src/orders.pxi",
        Replace("cdef uint32_t most = min(4 * <uint32_t>self._ring.header.num_wanted, ", "cdef uint32_t most = min(1, "),
        (f"{PROMISES}test_all_workers_read_the_rows_of_one_batch",),
        ("trainer",),
    ),
    Defect(
        "R11",
        "only one batch is ordered at a time",
        "SeedStream._fill",
        Replace("self._num_ahead", "1"),
        (
            f"{PROMISES}test_slow_sample_does_not_keep_other_slots_from_filling",
            f"{PROMISES}test_workers_read_into_the_next_epoch_before_it_begins",
        ),
    ),
    # ------------------------------------------------ R12: the epoch travels with its order
    Defect(
        "R12",
        "a worker keeps the epoch of its first order",
        "SampleReader.sample",
        Replace("ring.epoch", 'self.__dict__.setdefault("epoch", ring.epoch)'),
        (
            f"{PROMISES}test_persistent_workers_know_the_epoch_of_every_order",
            "tests/loader/test_seed_mode.py::test_batches_do_not_depend_on_workers_or_start_method",
        ),
    ),
    # ------------------------------------------------ R13: a budget in bytes
    Defect(
        "R13",
        "cgroup limits are ignored",
        "available_bytes",
        Replace("min([free_memory_bytes(root), *(cgroup.rest for cgroup in memory_cgroups(root))])", "free_memory_bytes(root)"),
        (
            "tests/shm/test_preflight.py::test_v2_limit_minus_unreclaimable_usage_counts",
            "tests/shm/test_preflight.py::test_v1_limit_counts",
        ),
    ),
    Defect(
        "R13",
        "ring_bytes has no effect",
        "RingMemory._payload",
        Replace("self._limit is not None and self.nbytes + nbytes > self._limit", "False"),
        ("tests/loader/test_bad_input.py::test_ring_larger_than_ring_bytes_is_refused_with_figures",),
    ),
    # ------------------------------------------------ R14: on_error
    Defect(
        "R14",
        "bad samples are not counted",
        "BadSamples._count",
        omit("self.count += 1"),
        (
            "tests/loader/test_policies.py::test_skipping_makes_the_batch_shorter",
            "tests/loader/test_policies.py::test_more_bad_samples_than_allowed_end_the_pass",
        ),
    ),
    Defect(
        "R14",
        "the substitute is not the one that the order defines",
        "BadSamples.replaced",
        Replace("self.next_index(order, first_row, tries + 1)", "self.next_index(order, first_row, tries + 2)"),
        ("tests/loader/test_policies.py::test_bad_sample_is_substituted_by_the_next_of_the_permutation",),
    ),
    Defect(
        "R14",
        "orders of torch mode do not name their pass",
        "TorchIterator._order_of",
        Replace("self._pass", "0"),
        ("tests/loader/test_policies_under_fault.py::test_each_failure_counts_against_max_bad[None-1]",),
    ),
    Defect(
        "R14",
        "max_bad has no effect",
        "BadSamples._count",
        Replace("self._max_bad is not None and self.count > self._max_bad", "False"),
        ("tests/loader/test_policies.py::test_more_bad_samples_than_allowed_end_the_pass",),
    ),
    *[
        Defect(
            "R14",
            f"samples of a batch that could not be collated are read again by {who}",
            method,
            Replace("self._has_read_all", "False"),
            (
                f"tests/loader/test_policies.py::test_samples_of_a_batch_that_cannot_be_collated_are_read_once_in_torch_mode[Filtered-1-{n}]",
            ),
        )
        for who, method, n in (("a worker", "SampleReader.bad_rows", 2), ("the trainer", "InlineReader._bad_rows", 0))
    ],
    Defect(
        "N8",
        "a worker that sleeps counts as decoding",
        "time_shares:shares",
        omit("asleep += max(its_busy - _runnable_ns(last, worker, its_busy), 0)"),
        ("tests/top/test_stalls.py::test_workers_that_sleep_wait_for_storage[1-70-source]",),
    ),
    Defect(
        "N8",
        "workers in a container are taken for processes of the host",
        "RingReader.snapshot",
        Replace('seen_pid in (None, seen["owner_pid"])', "True"),
        ("tests/top/test_stalls.py::test_ids_of_another_pid_namespace_are_not_taken_for_processes_here",),
    ),
    Defect(
        "N8",
        "the sleep of workers that have ended is unknown",
        "Engine.counters",
        omit('worker["runnable_ns"] = at_end'),
        ("tests/top/test_stalls.py::test_workers_that_slept_are_known_after_they_have_ended[None]",),
    ),
    *[
        Defect(
            "R14",
            f"the search for bad samples moves the generators of {who}",
            method,
            Replace("with generators_kept(), OwnGenerators(self._job.dataset).kept():", "if True:"),
            (f"tests/loader/test_policies.py::test_search_for_the_bad_sample_draws_no_random_numbers_in_torch_mode[{n}]",),
        )
        for who, method, n in (("a worker", "SampleReader.bad_rows", 2), ("the trainer", "InlineReader._bad_rows", 0))
    ],
    # ------------------------------------------------ R15: sample_timeout_s
    Defect(
        "R15",
        "the stack of the stuck worker is left out",
        "timeout_text",
        Replace(
            'f"{what} sample_timeout_s={limit_s}: worker {worker} {fate} and is replaced. Its stack:\\n{stack}\\n"',
            'f"{what} sample_timeout_s={limit_s}: worker {worker} {fate} and is replaced. "',
        ),
        ("tests/loader/test_policies.py::test_sample_timeout_error_has_the_stack_of_the_worker",),
    ),
    Defect(
        "R15",
        "no sample ever times out",
        "Supervisor.end_if_timed_out",
        Replace("self._sample_timeout_s or 0", "1e9"),
        ("tests/loader/test_policies.py::test_timed_out_samples_can_be_skipped",),
    ),
    Defect(
        "R15",
        "a worker is killed for a sample that was late at one look only, as after a pause of the machine",
        "Supervisor.end_if_timed_out",
        Replace("self._late.get(worker)", "self._late.setdefault(worker, (number, row))"),
        ("tests/loader/test_policies.py::test_sample_that_is_late_at_one_look_only_does_not_time_out",),
    ),
    Defect(
        "R15",
        "the first of several samples read at once is blamed for all",
        "SampleReader.begin_all",
        omit("self._ring.begin_row(-1, key)"),
        ("tests/loader/test_policies_under_fault.py::test_timeout_names_the_sample_among_samples_read_at_once[None]",),
    ),
    Defect(
        "R14",
        "the row that the trainer waits for is blamed for a death among rows read by threads",
        "Supervisor._blame",
        Replace("self._num_threads > 1 and not self._kills[of_batch]", "False"),
        ("tests/loader/test_policies_under_fault.py::test_good_sample_read_repeatedly_beside_a_deadly_one_is_kept",),
    ),
    Defect(
        "R14",
        "a batch that is ordered again is blamed for earlier deaths",
        "Supervisor._blame",
        Replace("number", "0"),
        ("tests/loader/test_policies_under_fault.py::test_two_deadly_samples_of_one_batch_are_substituted[bad1-first1-4]",),
    ),
    Defect(
        "R6",
        "rows of a dead worker are read at once again",
        "WorkerLoop._read_batch_into",
        Replace("ring.is_suspect", "False"),
        (
            "tests/loader/test_policies_under_fault.py::test_only_the_bad_sample_is_skipped_among_samples_read_at_once[5-kills-Rows]",
        ),
    ),
    Defect(
        "R15",
        "the first of several samples that an actor reads at once is blamed for all",
        "SampleTimer.look",
        Replace("() if is_several else (row,)", "(max(row, 0),)"),
        ("tests/ray/test_lateness.py::test_late_samples_read_in_one_call_are_not_named_individually[False]",),
    ),
    Defect(
        "R6",
        "rows of a dead actor are read at once again",
        "ActorRing.order",
        Replace("is_suspect", "False"),
        ("tests/ray/test_decoder.py::test_rows_that_killed_an_actor_are_then_read_one_by_one[AtOnce]",),
    ),
    Defect(
        "E10",
        "a sampler with indices beyond the dataset is accepted",
        "check_arguments",
        omit("_check_samplers(given)"),
        ("tests/loader/test_bad_input.py::test_sampler_with_indices_beyond_the_dataset_is_refused[weights-4]",),
    ),
    # ------------------------------------------------ R16: what cannot travel
    Defect(
        "R16",
        "the error does not name what cannot be pickled",
        "pickled_once",
        Replace(
            '(f"{path} ({type(value).__qualname__})" for path, value in culprits)',
            '(f"{path} ({type(value).__qualname__})" for path, value in ())',
        ),
        ("tests/loader/test_bad_input.py::test_error_names_the_path_of_what_cannot_be_pickled",),
    ),
    Defect(
        "R16",
        "a fork beside CUDA and threads does not warn",
        "process_pool",
        omit("warn_of_fork()"),
        (f"{PROMISES}test_fork_in_a_process_that_uses_cuda_warns", f"{PROMISES}test_fork_beside_running_threads_is_logged_once"),
    ),
    Defect(
        "R16",
        "a forked child uses the persistent workers of its parent",
        "ShmLoader.__iter__",
        Replace('getattr(self._iterator, "is_of_parent", False)', "False"),
        ("tests/behaviour/test_nesting.py::test_forked_child_can_begin_an_epoch_of_a_loader_with_persistent_workers[None]",),
    ),
    # ------------------------------------------------ R17: samples that do not fit
    Defect(
        "R17",
        "a sample of another shape leaves its row unchanged",
        "WorkerLoop._place_all",
        Replace("not placer.put(sample, row)", "not placer.put(sample, row) and False"),
        (
            "tests/loader/test_bad_input.py::test_sample_of_another_shape_is_refused_in_torch_mode_with_torchs_message[ReadTogether]",
        ),
    ),
    Defect(
        "R17",
        "a batch larger than its slot gets no more memory",
        "RingMemory.answer_need",
        omit("self.ensure(slot, nbytes)"),
        ("tests/loader/test_growth.py::test_growing_batches_are_right_and_old_memory_is_released",),
    ),
    # ------------------------------------------------ R18: damaged files
    Defect(
        "R18",
        "a .npy file may be shorter than its header says",
        "npy_place",
        Replace("offset + needed > nbytes", "False"),
        ("tests/formats/arrays/test_arrays.py::test_damaged_header_is_an_error_or_another_valid_array",),
    ),
    Defect(
        "R18",
        "numbers of several types become a list",
        "_Columns.node",
        Replace("all(map(_is_number, values))", "False"),
        ("tests/batch/test_every_kind.py::test_numbers_of_several_types_and_subclasses_become_torchs_tensor[int, float]",),
    ),
    Defect(
        "R18",
        "a number beside a zero-dimensional array makes a list of the batch",
        "collate:_is_number",
        Replace("value.ndim == 0", "False"),
        ("tests/batch/test_every_kind.py::test_numbers_beside_arrays_become_what_torch_makes_of_them",),
    ),
    Defect(
        "R18",
        "the error does not name the file whose array cannot be rows",
        "HeldArrays.add",
        Replace('raise type(error)(f"{place.path}: {error}") from None', "raise"),
        ("tests/formats/arrays/test_arrays.py::test_error_about_an_invalid_array_names_its_file",),
    ),
    Defect(
        "R18",
        "an index is used without verification",
        "RecordFile._own",
        Replace(
            'not text.startswith(MAGIC) or len(body) % 8 or said != {**self._identity, "crc32c": crc32c(body)}',
            "not text.startswith(MAGIC) or len(body) % 8",
        ),
        (
            "tests/formats/tfrecord/test_files.py::test_index_of_an_older_version_is_rebuilt",
            "tests/formats/tfrecord/test_files.py::test_damaged_index_is_rebuilt",
        ),
    ),
    Defect(
        "R18",
        "the checksum of a record is not compared",
        "src/records.pyx",
        Replace("            if stored != crc_masked(crc):\n", "            if False:\n"),
        ("tests/formats/tfrecord/test_round_trip.py::test_any_changed_byte_and_any_truncation_is_detected",),
        ("records",),
    ),
    Defect(
        "R18",
        "the checksum of a tar header is not compared",
        "src/tar_headers.pxi",
        Replace("        if not _sum_holds(block):\n", "        if False:\n"),
        ("tests/formats/tar/test_shard.py::test_flipped_bit_of_a_header_is_an_error_or_changes_nothing",),
        ("tar",),
    ),
    Defect(
        "R18",
        "libjpeg's warnings of damaged data are ignored",
        "src/jpeg_guard.h",
        Replace(
            "    if (guard->strictness == JPEG_STRICT || (guard->strictness == JPEG_WHOLE && !jpeg_is_remark(text)))\n",
            "    if (0)\n",
        ),
        (
            "tests/formats/images/test_jpeg.py::test_damage_above_or_within_a_part_is_an_error_and_damage_below_is_ignored",
            "tests/formats/images/test_jpeg.py::test_data_after_the_last_row_is_checked_with_the_last_row",
        ),
        ("jpeg",),
    ),
    Defect(
        "R18",
        "bytes before a restart marker are taken for harmless",
        "src/jpeg_guard.h",
        Replace("        return marker < 0xD0 || marker > 0xD7;\n", "        return 1;\n"),
        ("tests/formats/images/test_irregular.py::test_bytes_before_a_restart_marker_are_damage",),
        ("jpeg",),
    ),
    Defect(
        "R18",
        "the pixels of a PNG with wrong checksums are not checked",
        "open_image",
        omit("check_pixels(data)"),
        ("tests/formats/images/test_irregular.py::test_png_that_pillow_rejects_is_an_error_and_pixels_are_never_wrong",),
    ),
    Defect(
        "R18",
        "a TIFF that Pillow has rotated is rotated again",
        "PillowImage.orientation",
        omit("self.picture.load()"),
        ("tests/formats/images/test_upright.py::test_every_kind_of_file_is_rotated_as_by_pillow",),
    ),
    Defect(
        "R18",
        "only EXIF is read for the orientation of a JPEG",
        "_LibraryJpeg.orientation",
        Replace('(b"Exif", b"tiff:Orientation")', '(b"Exif",)'),
        ("tests/formats/images/test_upright.py::test_every_kind_of_file_is_rotated_as_by_pillow",),
    ),
    Defect(
        "R18",
        "workers do not report files that break a rule",
        "WorkerLoop.work",
        Replace("irregular_files.value - num_irregular", "0"),
        ("tests/formats/images/test_irregular.py::test_stats_count_irregular_images",),
    ),
    Defect(
        "R18",
        "a lossless JPEG goes to the library that cannot convert it to RGB",
        "open_image",
        Replace("header.num_components in (1, 3) and not is_lossless", "header.num_components in (1, 3)"),
        ("tests/formats/images/test_irregular.py::test_lossless_jpeg_is_decoded_or_gives_a_clear_error",),
    ),
    Defect(
        "R18",
        "an iterable dataset with a length is taken for a map-style one",
        "is_map_style",
        Replace(
            'hasattr(candidate, "__len__") and hasattr(candidate, "__getitem__") and not is_iterable(candidate)',
            'hasattr(candidate, "__len__") and hasattr(candidate, "__getitem__")',
        ),
        ("tests/bench/test_spec.py::test_iterable_dataset_with_a_length_is_recognized",),
    ),
    Defect(
        "R18",
        "restart markers are counted regardless of their numbers",
        "src/jpeg_cut.h",
        Replace(
            "        if (at[-1] != (number + 1 == layout->num_intervals ? JPEG_EOI : JPEG_RST0 + number % 8))\n",
            "        if (number + 1 == layout->num_intervals ? at[-1] != JPEG_EOI : (at[-1] & 0xF8) != JPEG_RST0)\n",
        ),
        ("tests/formats/images/test_restart_reading.py::test_file_with_irregular_markers_is_read_sequentially",),
        ("jpeg",),
    ),
    # ------------------------------------------------ R19: no pickle from remote data
    Defect(
        "R19",
        "pickles in a shard are opened without permission",
        "Decoders._search",
        Replace("_UNSAFE[last] if self._allow_pickle else None", "_UNSAFE[last]"),
        ("tests/formats/tar/test_decoders.py::test_pickles_stay_bytes_unless_requested",),
    ),
    # ------------------------------------------------ E4: leases
    Defect(
        "E4",
        "a tensor does not hold its slot",
        "src/lease.h",
        Replace(
            "    atomic_fetch_add_explicit(&lease->refs, 1, memory_order_relaxed);\n    return managed;\n", "    return managed;\n"
        ),
        ("tests/engine/test_aliases.py::test_alias_keeps_its_slot_until_it_dies",),
        ("trainer",),
    ),
    Defect(
        "E4",
        "a batch that is copied out is still in the ring",
        "copied_rows",
        Replace("torch.Tensor.clone", "lambda tensor: tensor"),
        ("tests/engine/test_copy_out.py::test_list_of_a_loader_is_correct_and_warns_once",),
    ),
]
