"""Mistakes where two promises of the engine meet, and the tests that notice."""

from __future__ import annotations

from tests.planted.planting import Defect

SMALL = "tests/shm/test_small_room.py::"
SHARED = "tests/behaviour/test_shared_iterators.py::"
KINDS = "tests/batch/test_tensor_kinds.py::"
ABILITIES = "tests/behaviour/test_abilities.py::"

ENGINE_DEFECTS = [
    Defect(
        "R1",
        "a descriptor that is used again is taken for the same memory",
        "shmload/shm/segment.py",
        '    return f"{proc_self()}/fd/{fd}{_NAMED}{name}"\n',
        '    return f"{proc_self()}/fd/{fd}"\n',
        (
            f"{SMALL}test_slots_that_grow_again_and_again_come_right",
            f"{SMALL}test_what_other_ranks_map_of_a_shared_ring_comes_right",
            f"{SMALL}test_slots_that_were_parked_and_come_back_are_delivered",
        ),
        is_crossing=True,
    ),
    Defect(
        "R1",
        "whoever opens a descriptor takes what is there",
        "shmload/shm/segment.py",
        "    if name and os.readlink(",
        "    if not name and os.readlink(",
        ("tests/shm/test_segment.py::test_a_descriptor_that_another_segment_has_by_now_is_not_taken_for_the_first",),
    ),
    Defect(
        "E4",
        "threads in seed mode do not wait for their turn",
        "shmload/modes/seed_mode.py",
        "            with turns.lock:\n                if turns.is_taken:\n",
        "            with __import__('contextlib').nullcontext():\n                if False:\n",
        (f"{SHARED}test_each_batch_comes_to_one_thread[seed mode-2]",),
        is_crossing=True,
    ),
    Defect(
        "E4",
        "threads in torch mode do not wait for their turn",
        "shmload/modes/torch_mode.py",
        "            with turns.lock:\n                if turns.is_taken:\n",
        "            with __import__('contextlib').nullcontext():\n                if False:\n",
        (f"{SHARED}test_each_batch_comes_to_one_thread[torch mode-2]",),
        is_crossing=True,
    ),
    Defect(
        "R5",
        "a thread that waits does not hear that the loader is closed",
        "shmload/engine/engine.py",
        "        if self._is_closed:  # by another thread, while this one waits\n            raise self._why_closed()\n",
        "",
        (f"{SHARED}test_closing_the_loader_ends_the_wait_of_another_thread",),
    ),
    Defect(
        "R17",
        "sparse tensors cannot be copied out",
        "shmload/batch/deliver.py",
        "        return tensor.clone()\n",
        "        return tensor.clone(memory_format=torch.preserve_format)\n",
        (f"{KINDS}test_whatever_a_collate_fn_gives_comes_as_it_is_held_or_not[coo-seed mode]",),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "a sample that is read again is the one that was read for the layout",
        "shmload/worker/loop.py",
        "        if ring.is_packed_only or (samples is not None and len(samples) != end - first):\n",
        "        if ring.is_packed_only or (samples is not None and len(samples) != end - first):\n            reader.keep(keys[first], head)\n",
        (f"{KINDS}test_a_sample_that_stands_twice_in_a_batch_is_read_twice",),
        is_crossing=True,
    ),
    Defect(
        "R17",
        "tensors that require grad are stacked with out=",
        "shmload/worker/torch_side.py",
        "    if all(tensor.dtype is first.dtype for tensor in batch):\n",
        "    if False:\n",
        (f"{KINDS}test_tensors_of_every_kind_are_stacked_as_torch_does[gradient-1-torch mode]",),
        is_crossing=True,
    ),
    Defect(
        "R17",
        "seed mode lists Parameters",
        "shmload/batch/collate.py",
        '        if rule.mode(name or "data") is not None or not (is_strided and is_alike):\n',
        "        if True:\n",
        (f"{KINDS}test_tensors_of_every_kind_are_stacked_as_torch_does[parameter-1-seed mode]",),
    ),
    Defect(
        "R17",
        "what a wrapper passes on is taken for its own",
        "shmload/world.py",
        "        inspect.getattr_static(value, name)\n",
        "        getattr(value, name)\n",
        (
            f"{ABILITIES}test_a_wrapper_is_not_read_through_what_it_wraps",
            f"{ABILITIES}test_a_dataset_that_answers_any_name_is_read_by_its_items",
        ),
    ),
    Defect(
        "E4",
        "a pinned slot forgets the stream of its batch's delivery",
        "shmload/device/calls.py",
        "            self._named[slot] = list(self._calls.current_streams())\n",
        "            pass\n",
        ("tests/device/test_pinned_ring.py::test_a_copy_on_the_stream_of_delivery_is_waited_for_wherever_the_batch_dies",),
    ),
    Defect(
        "E4",
        "the current device is asked for anew",
        "shmload/device/calls.py",
        "            self._index = torch.cuda.current_device()\n",
        '            return torch.device("cuda", torch.cuda.current_device())\n',
        ("tests/device/test_options.py::test_the_current_device_is_the_one_that_was_current_when_it_was_asked_first",),
    ),
    Defect(
        "R15",
        "a late sample's stack is told twice",
        "shmload/engine/parts.py",
        "logging.DEBUG if is_raised else logging.WARNING",
        "logging.WARNING",
        ("tests/loader/test_policies.py::test_a_sample_that_takes_too_long_ends_with_the_stack_of_its_worker",),
    ),
    Defect(
        "R13",
        "a limit on file sizes is left to multiprocessing to find",
        "shmload/shm/segment.py",
        "    if limit != resource.RLIM_INFINITY and limit < nbytes:",
        "    if False:",
        ("tests/shm/test_segment.py::test_under_a_limit_on_file_sizes_a_ring_is_refused_with_the_remedy_and_nothing_else_is_said",),
    ),
    Defect(
        "S4",
        "a lease complains at the interpreter's end",
        "shmload/storage/folder.py",
        "        if sys is not None and not sys.is_finalizing():",
        "        if True:",
        ("tests/storage/cache/test_folder.py::test_a_lease_that_outlives_the_modules_names_says_nothing",),
    ),
    Defect(
        "S4",
        "a file that was replaced under its name is read as it was",
        "shmload/growing/dataset.py",
        "        files = {file: self._files.get(file) or _Opened(self.folder, file) for file in snapshot.files}\n",
        "        kept = {file.name: opened for file, opened in self._files.items()}\n"
        "        files = {file: kept.get(file.name) or _Opened(self.folder, file) for file in snapshot.files}\n",
        ("tests/growing/test_intake.py::test_of_a_file_replaced_under_its_name_the_next_epoch_has_the_new_one",),
    ),
    Defect(
        "N1",
        "a batch of a user's class of tensors cannot be copied out",
        "shmload/batch/deliver.py",
        "    except RuntimeError:  # torch deep-copies",
        "    except MemoryError:  # torch deep-copies",
        (f"{KINDS}test_a_subclass_is_copied_out_with_what_it_carries",),
        is_crossing=True,
    ),
    Defect(
        "R1",
        "eight-bit floats are delivered as bytes where DLPack knows none",
        "shmload/batch/deliver.py",
        "    if names is not None and not viewed:\n",
        "    if names is not None:\n",
        ("tests/batch/test_every_kind.py::test_eight_bit_floats_come_where_dlpack_knows_none[dict]",),
    ),
]
