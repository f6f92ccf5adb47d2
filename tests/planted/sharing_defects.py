"""Defects in the memory that ranks of a node share, and the tests that detect them."""

from __future__ import annotations

from tests.planted.planting import Defect

WORDS = "tests/sharing/test_words.py::"
SAME = "tests/sharing/test_same_batches.py::"
PARTINGS = "tests/sharing/test_partings.py::"
BALANCING = "tests/sharing/test_balancing.py::"

SHARING_DEFECTS = [
    Defect(
        "G1",
        "ranks that share a ring may have different orders of one type",
        "shmload/sharing/choice.py",
        '"sampler": next((order.identity for order in orders), ""),',
        '"sampler": next((type(order).__name__ for order in orders), ""),',
        ("tests/sharing/test_gathering.py::test_orders_of_one_kind_that_were_made_of_other_numbers_are_refused",),
    ),
    Defect(
        "G1",
        "a slot that a follower holds is reused",
        "src/share.h",
        "        if (atomic_load_explicit(shml_hold(share, rank, slot), memory_order_acquire)) return 0;\n",
        "",
        (f"{WORDS}test_a_slot_that_a_follower_holds_is_not_used_again",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that a follower has not reached is overwritten",
        "src/share.h",
        "memory_order_acquire) <= generation)\n            return 0;\n",
        "memory_order_acquire) < generation)\n            return 0;\n",
        (f"{WORDS}test_a_slot_is_used_again_only_when_every_rank_is_done_with_it",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "the leader waits for batches of an abandoned generation",
        "src/share.h",
        "SHML_REPORT_GENERATION), memory_order_acquire) <= generation)",
        "SHML_REPORT_GENERATION), memory_order_acquire) <= generation + 1)",
        (f"{WORDS}test_a_generation_that_followers_have_left_is_not_waited_for",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that its leader must order again is taken for ready",
        "src/share.h",
        " || atomic_load_explicit(&ring->slots[slot].repack, memory_order_acquire) == order) return",
        ") return",
        (f"{WORDS}test_an_order_that_is_written_again_keeps_its_place_and_is_ready_when_it_is_filled_anew",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that is ordered again waits for followers that have read it",
        "src/share.pxi",
        "epoch == self._newest_epoch and step > self._newest_step))",
        "epoch == self._newest_epoch))",
        (f"{WORDS}test_a_batch_that_is_ordered_again_after_an_interrupt_takes_no_slot_from_others",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "what a rank writes into a batch shows in a later one",
        "src/share.h",
        "    madvise((uint8_t *)place->map->base + place->offset, place->nbytes, MADV_DONTNEED);\n",
        "",
        (f"{SAME}test_what_a_rank_writes_into_a_batch_no_other_sees",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "followers see what the leader writes into a batch",
        "shmload/engine/ring.py",
        "            is_private=options.num_ranks > 1,\n",
        "",
        (f"{SAME}test_what_a_rank_writes_into_a_batch_no_other_sees",),
    ),
    Defect(
        "G1",
        "a rank that leaves the loop does not announce it",
        "shmload/modes/seed_mode.py",
        "            engine.leave_pass()\n",
        "            pass\n",
        (f"{PARTINGS}test_a_rank_that_leaves_the_loop_early_is_an_error_in_the_others",),
    ),
    Defect(
        "G1",
        "ranks do not check whether the others live",
        "shmload/sharing/rank_group.py",
        "            self._ended.add(",
        "            set().add(",
        (f"{PARTINGS}test_a_rank_that_is_killed_with_a_batch_in_its_hands_ends_the_others_reading_soon",),
    ),
    Defect(
        "G1",
        "the starting positions of ranks are not compared",
        "shmload/sharing/rank_group.py",
        "(ended, *place) != (self._count_before, order.epoch, order.step):",
        "ended != self._count_before:",
        (f"{PARTINGS}test_ranks_that_begin_in_different_places_are_told_so",),
    ),
    Defect(
        "G1",
        "idle workers of other ranks are not woken",
        "shmload/sharing/balancing.py",
        "                peer_pools.bell.post_up_to(min(num_left, num_idle))\n",
        "",
        ("tests/sharing/test_helpers.py::test_neighbors_are_rung_for_if_they_are_idle_and_the_pool_is_not",),
    ),
    Defect(
        "G1",
        "one sample kills one helper after the other",
        "src/protocol.h",
        "            if (w >= num_wanted && atomic_load_explicit((shml_u64 *)&slot->num_lost, memory_order_relaxed)) continue;\n",
        "",
        ("tests/sharing/test_helpers.py::test_what_has_ended_a_worker_is_left_to_the_pool",),
        ("filler",),
    ),
    Defect(
        "G1",
        "helpers are never admitted",
        "shmload/sharing/balancing.py",
        "        self._ring.accept(record, ticket)\n",
        "",
        (f"{BALANCING}test_a_rank_whose_worker_stands_still_is_helped_by_its_neighbors_and_no_batch_is_another",),
    ),
    Defect(
        "G1",
        "chunks of a dead helper are not recovered",
        "shmload/sharing/balancing.py",
        "            while self._ring.recover(record) >= 0:\n                num_taken_back += 1\n",
        "",
        (
            f"{BALANCING}test_helpers_that_are_killed_right_after_their_claim_cost_nothing",
            f"{BALANCING}test_a_rank_that_is_killed_with_its_worker_in_a_neighbors_chunk_leaves_the_neighbor_as_it_was",
        ),
    ),
    Defect(
        "G1",
        "a helper waits for the trainer whose batch it fills",
        "shmload/worker/slot_memory.py",
        "        if self._is_helper:\n            ring.ask_repack()\n            return False\n",
        "",
        (f"{BALANCING}test_a_helper_never_waits_for_the_trainer_whose_batch_it_fills",),
    ),
]
