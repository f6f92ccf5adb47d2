"""The order of schedule version 1 is frozen: runs resumed with a later shmload must read the same samples."""

import json
from pathlib import Path

import pytest

import shmload
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.mix_order import MixOrder
from shmload.schedule.permutation import sample_key, sample_key_pair
from shmload.schedule.schedule import Schedule
from shmload.schedule.shard_shuffle import ShardShuffle

FOLDER = Path(__file__).parent / "golden"
GOLDEN = [json.loads(line) for line in (FOLDER / "schedule-1.jsonl").read_text().splitlines()]
ORDERS = [json.loads(line) for line in (FOLDER / "orders-1.jsonl").read_text().splitlines()]
MIXES = [json.loads(line) for line in (FOLDER / "mix-1.jsonl").read_text().splitlines()]
BUMP = "the order of schedule version 1 changed: bump the version (SCHEDULE_VERSION) and keep the old order repeatable"


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"n={golden['n']}")
def test_first_indices_of_version_1_are_unchanged(golden):
    schedule = Schedule(golden["n"], batch_size=10, seed=golden["seed"], shuffle=True, version=1)
    num_steps = min(schedule.num_steps, 100)
    indices = [index for step in range(num_steps) for index in schedule.batch(golden["epoch"], step).tolist()]
    assert golden["indices"] == indices, BUMP


@pytest.mark.parametrize("golden", ORDERS, ids=lambda golden: f"{golden['order']}-{golden['epoch']}")
def test_other_orders_of_version_1_are_unchanged(golden):
    first, key = golden["of"], {"seed": golden["seed"], "epoch": golden["epoch"]}
    order = getattr(shmload, golden["order"])(first, **golden["options"])
    assert golden["identity"] == order.identity, BUMP
    if isinstance(order, KeyedOrder):
        got = order.take(0, min(order.n, 200), **key).tolist()
    else:
        got = [order.batch(number, **key).tolist() for number in range(order.num_batches(**key))]
    assert golden["indices"] == got, BUMP


@pytest.mark.parametrize("golden", MIXES, ids=lambda golden: golden["what"])
def test_mixtures_of_version_1_are_unchanged(golden):
    weights = {int(start): of_piece for start, of_piece in golden["weights"].items()}
    order = MixOrder(golden["sizes"], weights, stop=golden["stop"], shuffle=golden["shuffle"])
    assert (golden["identity"], golden["n"]) == (order.identity, order.n), BUMP
    key = {"seed": golden["seed"], "epoch": golden["epoch"]}
    assert golden["indices"] == order.take(0, min(order.n, 200), **key).tolist(), BUMP
    assert golden["counters"] == order.counters_at(min(order.n, 200), **key), BUMP


def test_sample_keys_are_unchanged():
    assert sample_key_pair(1, 2, 3) == (0x865569D2A122842A, 0x6C86011E67F96425), BUMP
    assert sample_key(1, 2, 3, 4) == 0x374548D610FE5908, BUMP


def test_defaults_of_orders_are_unchanged():
    orders = [
        (shmload.BlockShuffle(9, block_size=3), "window=16)"),
        (ShardShuffle([4, 5]), "window=16)"),
        (shmload.Weighted([1, 2]), "replacement=True)"),
        (shmload.LengthBuckets([1, 2], batch_size=2), "window=100, group=8, drop_last=False)"),
        (shmload.TokenBudget([1, 2], max_tokens=2), "max_samples=None, window=100, group=8, oversized=raise)"),
    ]
    assert [order for order, end in orders if not order.identity.endswith(end)] == [], BUMP
