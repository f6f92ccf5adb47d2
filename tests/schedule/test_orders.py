"""Orders: a schedule and torch's samplers are read the same way."""

import numpy as np
import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from shmload.schedule.schedule import Orders, Schedule, ScheduledOrders


def as_lists(orders: Orders):
    return [list(batch) for batch in orders]


@pytest.mark.parametrize("first_step", [0, 1, 12, 13, 14])
def test_scheduled_orders_start_at_any_step(first_step):
    schedule = Schedule(100, batch_size=4, world_size=2, seed=0, shuffle=True)
    orders = ScheduledOrders(schedule, epoch=1, first_step=first_step, rank=1)
    expected = [schedule.batch(1, step, 1).tolist() for step in range(first_step, 13)]
    assert expected == as_lists(orders) == as_lists(orders)
    assert len(expected) == len(orders)
    assert all(batch.dtype == np.int64 for batch in orders)


def test_ranks_without_rows_stop_a_step_earlier():
    schedule = Schedule(9, batch_size=2, world_size=4, seed=0, shuffle=False, uneven="exact")
    lengths = [len(ScheduledOrders(schedule, epoch=0, rank=rank)) for rank in range(4)]
    assert [2, 1, 1, 1] == lengths == [len(as_lists(ScheduledOrders(schedule, epoch=0, rank=r))) for r in range(4)]


def test_a_batch_sampler_of_torch_is_an_order_as_it_stands():
    orders: Orders = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=False)
    assert as_lists(orders) == [[0, 1], [2, 3], [4]]
    assert as_lists(orders) == as_lists(ScheduledOrders(Schedule(5, batch_size=2, seed=0, shuffle=False), epoch=0))
