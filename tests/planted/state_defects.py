"""The defects of states; see defect_list.py."""

from __future__ import annotations

from tests.planted.planting import Defect

RESUME = "tests/resume/test_"
LIVING = f"{RESUME}living_loader.py::test_any_state_on_any_living_loader_gives_exactly_the_rest"

STATE_DEFECTS = [
    Defect(
        "N1",
        "an order that is only counting is made whole",
        "shmload/modes/torch_order.py",
        "        return np.arange(first, end) if order is None else order[first:end]\n",
        "        return (np.arange(n) if order is None else order)[first:end]\n",
        (f"{RESUME}huge_orders.py::test_1e11_samples_need_nothing[in order-0]",),
    ),
    Defect(
        "N1",
        "a place in an order that is only counting is counted to",
        "shmload/modes/torch_order.py",
        "        return iter(range(len(index_sampler))[num_skipped:])\n",
        "        return iter([i for i in range(len(index_sampler)) if i >= num_skipped])\n",
        (f"{RESUME}huge_orders.py::test_any_place_is_come_to_at_once[False]",),
    ),
    Defect(
        "N1",
        "a rank without a row in the last step says that the epoch is over",
        "shmload/modes/seed_mode.py",
        "        if place.is_over or place.step >= self.epochs.end_of_all(place.epoch):\n",
        "        if place.is_over or place.step >= self.epochs.end_of(place.epoch):\n",
        (
            f"{RESUME}any_rank.py::test_a_rank_without_a_row_in_the_last_step_knows_that_others_have_one",
            f"{RESUME}any_rank.py::test_so_it_is_of_a_growing_dataset",
        ),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "a rank whose pass has ended says that the last step is still to come",
        "shmload/modes/seed_mode.py",
        "            self.place.is_over = True\n",
        "",
        (f"{RESUME}any_rank.py::test_a_rank_without_a_row_in_the_last_step_knows_that_others_have_one",),
    ),
    Defect(
        "N1",
        "a pipeline that has ended for its rank says that the last step is still to come",
        "shmload/pipeline/conveyer.py",
        "            self._end()\n            raise StopIteration\n        if self.plan.",
        "            raise StopIteration\n        if self.plan.",
        (f"{RESUME}any_rank.py::test_so_it_is_of_a_pipeline[2-25-True]",),
    ),
    Defect(
        "N1",
        "an iterator that had ended in the state is at its end in the next pass, too",
        "shmload/worker/snapshot.py",
        "            self._epoch, self._iterator_state = epoch, None\n",
        "            self._epoch = epoch\n",
        (f"{LIVING}[iterable, iterator-1 persistent]",),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "a pass of living workers begins with what their iterators told in the last one",
        "shmload/modes/torch_order.py",
        "        self._notes = [between_passes(note) for note in last._notes] if self._is_iterable else last._notes\n",
        "        self._notes = last._notes\n",
        (f"{LIVING}[iterable, iterator-3 persistent]",),
    ),
    Defect(
        "N1",
        "a state between passes forgets the sampler's own",
        "shmload/modes/torch_order.py",
        "        own = own_state(index_sampler)\n",
        "        pass\n",
        (f"{LIVING}[a stateful sampler-0]",),
    ),
    Defect(
        "N1",
        "in seed mode a sampler that is at its end is begun anew when it is asked again",
        "shmload/modes/seed_mode.py",
        "        self._now = (epoch, step + (keys is not None), batches)",
        "        self._now = (epoch, step + 1, batches)",
        (f"{LIVING}[a stateful sampler, seed-1]",),
    ),
    Defect(
        "N1",
        "a state between passes is of the last snapshot",
        "shmload/modes/torch_order.py",
        "        notes = [pickle.loads(note) if note else {} for note in self._notes]",
        "        notes = [pickle.loads(note) if note else {} for note in self._snapshot[1]]",
        (
            f"{RESUME}living_loader.py::test_a_state_between_passes_is_of_now_however_rare_snapshots_are[iterable, dataset-1 persistent]",
        ),
    ),
    Defect(
        "N1",
        "batches that came out of order come again",
        "shmload/modes/torch_mode.py",
        "            while self._num_sent in self.progress.done:  # a resumed pass takes no notice of these\n",
        "            while self._num_sent < self.progress.done.first:\n",
        (f"{RESUME}out_of_order.py::test_out_of_order_each_sample_comes_once[map-False-1]",),
        is_crossing=True,
    ),
    Defect(
        "N1",
        "workers of an iterable dataset read again as many batches together as all had, and not each its own",
        "shmload/modes/torch_mode.py",
        '            self._read_again([now - then for now, then in zip(state["counts"], counted, strict=True)])\n',
        '            self._read_again([len(range(w, sum(state["counts"]) - sum(counted), len(counted))) for w in range(len(counted))])\n',
        (f"{RESUME}out_of_order.py::test_out_of_order_each_sample_comes_once[iterable-False-1]",),
    ),
    Defect(
        "N1",
        "a batch that was lost to an error counts as still to come",
        "shmload/modes/torch_mode.py",
        "                    self.progress.ended(lost.step, lost.worker)\n",
        "",
        (f"{RESUME}out_of_order.py::test_a_batch_that_was_lost_is_behind[2-1]",),
    ),
    Defect(
        "N1",
        "a pickle in a state is opened unasked",
        "shmload/schedule/state.py",
        "    if not is_trusted:\n",
        "    if is_trusted is None:\n",
        (
            f"{RESUME}trust.py::test_what_needs_pickle_needs_trust[dataset]",
            f"{RESUME}trust.py::test_a_state_that_torch_load_lets_through_runs_nothing",
        ),
    ),
    Defect(
        "N1",
        "a state's checksum is not looked at",
        "shmload/schedule/state.py",
        "    if type(state.get(CHECK)) is not int or state[CHECK] != expected:\n",
        "    if type(state.get(CHECK)) is not int:\n",
        (
            f"{RESUME}damaged.py::test_every_single_bit_counts",
            f"{RESUME}damaged.py::test_mutated_states_are_refused_or_say_the_same",
        ),
    ),
    Defect(
        "N1",
        "a growing dataset's state names a folder anywhere",
        "shmload/growing/library.py",
        '    return isinstance(name, str) and re.fullmatch("[0-9a-f]{12}", name) is not None\n',
        "    return isinstance(name, str)\n",
        (f"{RESUME}damaged.py::test_a_run_that_a_state_names_is_no_path",),
    ),
    Defect(
        "E4",
        "a sample's generator that was kept is the next sample's, too",
        "shmload/worker/sample_rng.py",
        "sys.getrefcount(_now.last) > _UNKEPT",
        "sys.getrefcount(_now.last) > _UNKEPT + 1",
        ("tests/loader/test_sample_rng.py::test_one_that_was_kept_is_left_alone",),
    ),
]
