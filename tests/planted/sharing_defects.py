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
        ("tests/sharing/test_gathering.py::test_orders_with_different_parameters_are_refused",),
    ),
    Defect(
        "G1",
        "a slot that a follower holds is reused",
        "src/share.h",
        "        if (atomic_load_explicit(shml_hold(share, rank, slot), memory_order_acquire)) return 0;\n",
        "",
        (f"{WORDS}test_slot_held_by_a_follower_is_not_reused",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that a follower has not reached is overwritten",
        "src/share.h",
        "memory_order_acquire) <= round)\n            return 0;\n",
        "memory_order_acquire) < round)\n            return 0;\n",
        (f"{WORDS}test_slot_is_reused_only_when_every_rank_is_done_with_it",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "the leader waits for batches of an abandoned round",
        "src/share.h",
        "SHML_REPORT_ROUND), memory_order_acquire) <= round)",
        "SHML_REPORT_ROUND), memory_order_acquire) <= round + 1)",
        (f"{WORDS}test_round_that_followers_have_left_is_not_awaited",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that its leader must order again is taken for ready",
        "src/share.h",
        " || atomic_load_explicit(&ring->slots[slot].repack, memory_order_acquire) == order) return",
        ") return",
        (f"{WORDS}test_rewritten_order_keeps_its_position_and_is_ready_once_refilled",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "a batch that is ordered again waits for followers that have read it",
        "src/share.pxi",
        "epoch == self._newest_epoch and step > self._newest_step))",
        "epoch == self._newest_epoch))",
        (f"{WORDS}test_batch_ordered_again_after_an_interrupt_takes_no_slot_from_others",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "what a rank writes into a batch shows in a later one",
        "src/share.h",
        "    madvise((uint8_t *)place->map->base + place->offset, place->nbytes, MADV_DONTNEED);\n",
        "",
        (f"{SAME}test_writes_into_a_batch_are_private_to_a_rank",),
        ("trainer",),
    ),
    Defect(
        "G1",
        "followers see what the leader writes into a batch",
        "shmload/engine/ring.py",
        "            is_private=options.num_ranks > 1,\n",
        "",
        (f"{SAME}test_writes_into_a_batch_are_private_to_a_rank",),
    ),
    Defect(
        "G1",
        "a rank that leaves the loop does not announce it",
        "shmload/modes/seed_mode.py",
        "            engine.leave_pass()\n",
        "            pass\n",
        (f"{PARTINGS}test_rank_that_leaves_the_loop_early_is_an_error_in_the_others",),
    ),
    Defect(
        "G1",
        "ranks do not check whether the others live",
        "shmload/sharing/rank_group.py",
        "            self._ended.add(",
        "            set().add(",
        (f"{PARTINGS}test_other_ranks_fail_soon_after_a_rank_is_killed_while_holding_a_batch",),
    ),
    Defect(
        "G1",
        "the starting positions of ranks are not compared",
        "shmload/sharing/rank_group.py",
        "(ended, *place) != (self._count_before, order.epoch, order.step):",
        "ended != self._count_before:",
        (f"{PARTINGS}test_ranks_that_begin_at_different_positions_raise",),
    ),
    Defect(
        "G1",
        "idle workers of other ranks are not woken",
        "shmload/sharing/balancing.py",
        "                peer_pools.bell.post_up_to(min(num_left, num_idle))\n",
        "",
        ("tests/sharing/test_helpers.py::test_idle_neighbors_are_woken_if_the_pool_is_busy",),
    ),
    Defect(
        "G1",
        "one sample kills one helper after the other",
        "src/protocol.h",
        "            if (w >= num_wanted && atomic_load_explicit((shml_u64 *)&slot->num_lost, memory_order_relaxed)) continue;\n",
        "",
        ("tests/sharing/test_helpers.py::test_chunk_that_ended_a_worker_is_left_to_the_pool",),
        ("filler",),
    ),
    Defect(
        "G1",
        "helpers are never admitted",
        "shmload/sharing/balancing.py",
        "        self._ring.accept(record, ticket)\n",
        "",
        (f"{BALANCING}test_rank_with_a_blocked_worker_is_helped_and_batches_are_unchanged",),
    ),
    Defect(
        "G1",
        "chunks of a dead helper are not recovered",
        "shmload/sharing/balancing.py",
        "            while self._ring.recover(record) >= 0:\n                num_taken_back += 1\n",
        "",
        (
            f"{BALANCING}test_helpers_killed_right_after_their_claim_lose_nothing",
            f"{BALANCING}test_rank_killed_with_its_worker_in_a_neighbors_chunk_does_not_affect_the_neighbor",
        ),
    ),
    Defect(
        "G1",
        "a helper waits for the trainer whose batch it fills",
        "shmload/worker/slot_memory.py",
        "        if self._is_helper:\n            ring.ask_repack()\n            return False\n",
        "",
        (f"{BALANCING}test_helper_never_waits_for_the_trainer_whose_batch_it_fills",),
    ),
]
