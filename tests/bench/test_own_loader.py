"""A DataLoader of the user is compared with a ShmLoader that delivers the same batches in the same order."""

import pytest
import torch
from torch.utils.data import DataLoader

from shmload.tools.bench.bench_job import BenchJob
from shmload.tools.bench.bench_options import BenchOptions
from shmload.tools.bench.measure import probe
from shmload.tools.bench.users_loader import arguments_of, key_batches, like_users, num_samples, users_collate, users_loader
from shmload.tools.object_reference import UsageError

slow = pytest.mark.slow(reason="reads two epochs of two or three loaders with workers")
FACTORIES = ("shuffled_loader", "custom_loader", "stream_loader", "unseeded_loader")


@pytest.fixture(autouse=True)
def planted(monkeypatch, request):
    monkeypatch.chdir(request.path.parent)
    monkeypatch.syspath_prepend(request.path.parent)


def batches(name, factory, epochs=2, **setting):
    own = users_loader(f"planted:{factory}", 7)
    loader = like_users(name, own, setting.get("num_workers"), setting.get("prefetch_factor"))
    try:
        return [[leaf.clone() for leaf in torch.utils._pytree.tree_leaves(batch)] for _ in range(epochs) for batch in loader]
    finally:
        if hasattr(loader, "close"):
            loader.close()


def assert_same_batches(expected, got):
    assert len(expected) == len(got)
    for one, other in zip(expected, got, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@slow
@pytest.mark.parametrize("name", ["shmload", "shmload-threads"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_shmloader_delivers_the_batches_of_the_users_loader(factory, name):
    assert_same_batches(batches("torch", factory), batches(name, factory))


@slow
def test_batches_do_not_depend_on_the_number_of_workers():
    expected = batches("torch", "shuffled_loader")
    assert_same_batches(expected, batches("torch", "shuffled_loader", num_workers=0))
    for name in ("shmload", "shmload-threads"):
        assert_same_batches(expected, batches(name, "shuffled_loader", num_workers=2, prefetch_factor=1))
    assert_same_batches(expected, batches("shmload-threads", "shuffled_loader", num_workers=0))


def test_loader_object_of_the_user_is_measured():
    own = users_loader("planted:unseeded_loader", 0)
    assert like_users("torch", own, None, None) is own


@pytest.mark.parametrize(("factory", "samples"), [("shuffled_loader", 96), ("custom_loader", None), ("stream_loader", None)])
def test_samples_per_epoch_are_known_if_all_batches_have_one_size(factory, samples):
    assert samples == num_samples(users_loader(f"planted:{factory}", 0))


def test_limit_is_measured_with_the_loaders_own_keys_and_function():
    own = users_loader("planted:sized_loader", 0)
    batches = key_batches(own)
    assert [next(batches)[0] for _ in range(17)] == [(6 * (batch % 16), 4 + batch % 16 % 3) for batch in range(17)]
    values = probe(
        BenchJob(
            workload="loader",
            dataset="",
            loader="",
            batch_size=None,
            num_workers=None,
            torch_loader="planted:sized_loader",
            seconds=0.001,
        )
    )
    assert (values["batch_size"], values["has_collate_fn"], values["batch_nbytes"]) == (6, 1, 6 * 4 * 4)


@pytest.mark.parametrize(("options", "is_plain"), [({}, True), ({"collate_fn": str}, False)])
def test_limit_without_batches_reads_items_of_the_sampler(options, is_plain):
    own = DataLoader([torch.zeros(3)] * 4, batch_size=None, sampler=[2, 0], **options)
    batches = key_batches(own)
    assert [next(batches) for _ in range(5)] == [[2], [0], [2], [0], [2]]
    collate = users_collate(own)
    assert collate is None if is_plain else collate([torch.zeros(3)]) == "tensor([0., 0., 0.])"


def test_sampler_without_samples_is_an_error():
    with pytest.raises(ValueError, match="the loader's sampler yields nothing"):
        next(key_batches(DataLoader([1], batch_sampler=iter([]))))


def test_items_are_unchanged_without_batching():
    loader = DataLoader([torch.zeros(3)] * 4, batch_size=None)
    arguments = arguments_of(loader)
    assert arguments["batch_size"] is None
    assert arguments["sampler"] is loader.sampler


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("planted:number", r"planted:number: needs a torch DataLoader or a function that returns one, given int"),
        ("planted:raises", r"calling it without arguments raised FileNotFoundError: no folder train/; name a function"),
        ("planted:Good", r"planted:Good: needs a function that returns a torch DataLoader, given Good"),
        ("planted:nothing", r"--torch-loader: 'planted' has no 'nothing'"),
    ],
)
def test_error_for_an_object_that_is_not_a_loader_is_one_line(spec, text):
    with pytest.raises(UsageError, match=text) as caught:
        users_loader(spec, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": "m:n"}, "--dataset: needs no --torch-loader, whose DataLoader says that itself; give one of the two"),
        ({"collate": "m:n"}, "--collate: needs no --torch-loader"),
        ({"batch_size": (4,)}, "--batch-size: needs no --torch-loader"),
        ({"workloads": ("rows",)}, "--workload: needs no --torch-loader"),
        ({"start_method": "fork"}, "--start-method: needs no --torch-loader"),
        (
            {"loaders": ("shmload", "shmload-seed")},
            "--loader: needs shmload, shmload-threads or torch with --torch-loader, given 'shmload-seed'",
        ),
    ],
)
def test_options_that_the_loader_already_sets_are_errors(options, text):
    with pytest.raises(UsageError, match=text):
        BenchOptions(torch_loader="m:n", **options)


@pytest.mark.slow(reason="measures in forked processes")
def test_loader_of_the_user_is_compared_with_a_shmloader(bench):
    import json

    done = bench("--quick", "--torch-loader", "planted:shuffled_loader", "--json")
    assert done.returncode == 0, done.stderr
    (section,) = json.loads(done.stdout)["workloads"]
    assert (section["name"], section["num_workers"], section["batch_size"]) == ("loader", 1, 8)
    assert section["loaders"]["shmload"]["same_bytes"] is True
    assert section["verdict"]["bottleneck"] in ("source", "decode", "hand-off", "trainer", "none")
