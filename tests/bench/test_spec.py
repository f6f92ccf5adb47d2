"""`module:name` arguments: every mistake has its own error of one line."""

import pytest
from torch.utils.data import DataLoader

from shmload import ShmLoader
from shmload.tools.bench.bench_options import BenchOptions
from shmload.tools.bench.builtin_workloads import WORKLOADS
from shmload.tools.bench.task import prepare
from shmload.tools.list_options import names
from shmload.tools.object_reference import UsageError, is_map_style, make_dataset, one_line, resolve

HERE = "shmload.tools.bench.generated_data"


@pytest.fixture(autouse=True)
def planted(monkeypatch, request):
    monkeypatch.chdir(request.path.parent)
    monkeypatch.syspath_prepend(request.path.parent)


def test_spec_names_an_object_of_a_module():
    from shmload.tools.bench.generated_data import Plain

    assert Plain is resolve(f"{HERE}:Plain", what="--dataset")
    assert Plain.__len__ is resolve(f"{HERE}:Plain.__len__", what="--dataset")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("planted", r"--dataset: needs package.module:name, given 'planted'; write package.module:name"),
        (":Good", r"needs package.module:name, given ':Good'"),
        ("planted:", r"needs package.module:name, given 'planted:'"),
        ("planted.py:Good", r"--dataset: 'planted.py:Good' names a file; write planted:Good"),
        ("./bench/planted.py:Good", r"names a file; write bench.planted:Good"),
        ("no_such:x", r"cannot import 'no_such': ModuleNotFoundError: No module named 'no_such'; write"),
        ("planted:nothing", r"'planted' has no 'nothing'; it has Any, "),
        ("planted:number.nothing", r"'planted:number' has no 'nothing'; it has as_integer_ratio, "),
        ("planted:number", r"--dataset planted:number: needs a dataset or a function that returns one, given int"),
        ("planted:raises", r"calling it without arguments raised FileNotFoundError: no folder train/; name a function"),
        ("planted:needs_path", r"calling it without arguments raised TypeError: .*'path'"),
        ("planted:lines", r"derived from torch.utils.data.IterableDataset, as torch's DataLoader does; given generator"),
        ("planted:WithoutLength", r"WithoutLength decodes into batches, but has no __len__: add it$"),
        ("planted:WithoutSchema", r"WithoutSchema decodes into batches, but has no schema and no __len__: add them$"),
        ("planted:Empty", r"needs at least 1 sample, given 0"),
    ],
)
def test_error_for_an_invalid_dataset_is_one_line(spec, text):
    with pytest.raises(UsageError, match=text) as caught:
        make_dataset(spec, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["planted:Stream", "planted:stream"])
def test_iterable_dataset_with_a_length_is_recognized(spec):
    made = make_dataset(spec, {})
    assert not is_map_style(made)
    assert len(list(made)) == len(made)


@pytest.mark.parametrize("spec", ["planted:Good", "planted:good", "planted:InPlace", "planted:in_place"])
def test_class_and_object_are_accepted_as_a_dataset(spec):
    assert len(make_dataset(spec, {})) == 100


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workloads": ("video",)}, "--workload: needs one of photos, records, rows, tokens, python, given 'video'"),
        ({"loaders": ("nowhere",)}, r"--loader: needs one of shmload, .*, torch, .* or module:factory, given 'nowhere'"),
        ({"loaders": ()}, r"--loader: needs at least one of .*, given none"),
        ({"batch_size": (0,)}, "--batch-size: needs at least 1, given 0"),
        ({"num_workers": (-1,)}, "--workers: needs at least 0, given -1"),
        ({"rounds": 0}, "--rounds: needs at least 1, given 0"),
        ({"seconds": 0.0}, "--seconds: needs more than 0, given 0"),
        ({"seconds": float("nan")}, "--seconds: needs more than 0, given nan"),
        ({"seconds": float("inf")}, "--seconds: needs more than 0, given inf"),
        ({"collate": "a:b"}, "--collate: needs --dataset, whose samples it is for"),
        ({"start_method": "thread"}, "--start-method: needs one of fork, spawn, forkserver, given 'thread'"),
    ],
)
def test_error_for_an_option_out_of_range_names_the_range_and_value(options, text):
    with pytest.raises(UsageError, match=text):
        BenchOptions(**options)


def test_all_workloads_are_selected_unless_a_dataset_is_given(tmp_path):
    def chosen(**options):
        tasks = prepare(BenchOptions(quick=True, **options), tmp_path, [])
        return [task.workload.name for task in tasks]

    assert chosen() == [name for name, workload in WORKLOADS.items() if workload.missing() is None]
    assert chosen(dataset="planted:Good") == ["dataset"]
    assert chosen(dataset="planted:Good", workloads=("rows",)) == ["rows", "dataset"]


def test_torch_is_the_reference_at_any_position():
    assert BenchOptions(loaders=("shmload", "torch", "m:threads")).reference == "torch"
    assert BenchOptions(loaders=("shmload", "m:threads")).reference == "m:threads"
    assert BenchOptions(loaders=("shmload-seed",)).reference == "shmload-seed"


def test_names_can_repeat_or_contain_commas():
    assert names(["rows,tokens", " python ", "rows"]) == ["rows", "tokens", "python"]


@pytest.mark.parametrize("loader", [DataLoader, ShmLoader])
def test_error_of_a_worker_is_shown_by_the_line_its_traceback_ends_with(loader):
    def collate(samples):
        raise ValueError("no batch\nof these")

    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker process 0") as failed:
        next(iter(loader(range(4), num_workers=1, collate_fn=collate)))
    assert one_line(failed.value) == "ValueError: no batch"
    assert one_line(ValueError("no batch\nof these")) == "ValueError: no batch"
    assert one_line(ValueError()) == "ValueError"
