"""transformers.Trainer with a ShmLoader: `get_train_dataloader` returns the prepared loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmload import ShmLoader
from tests.integrations.integrations_kit import Numbers, Tiny, facts

pytest.importorskip("accelerate", reason="needs accelerate: pip install shmload[integrations]")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install shmload[integrations]")

from shmload.integrations.accelerate import prepare  # noqa: E402  # only where accelerate is

pytestmark = pytest.mark.slow(reason="each trains a model by transformers.Trainer")


class Model(torch.nn.Module):
    """A loss; it records every batch it saw, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tiny()
        self.seen: list[Any] = []
        self.evaluated: list[Any] = []

    def forward(self, x: Any, noise: Any, index: Any) -> Any:
        (self.seen if self.training else self.evaluated).append(facts({"index": index, "noise": noise}))
        return {"loss": self.net(x), "logits": index}


class Trainer(transformers.Trainer):  # type: ignore[misc, unused-ignore]  # transformers may be without types
    """The Trainer of the documentation's example."""

    def __init__(self, loader: ShmLoader[Any], validation: ShmLoader[Any], **options: Any) -> None:
        super().__init__(**options)
        self.loader, self.validation = loader, validation

    def get_train_dataloader(self) -> Any:
        return prepare(self.accelerator, self.loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return prepare(self.accelerator, self.validation)


def arguments(folder: Path, **options: Any) -> Any:
    options = {"num_train_epochs": 2, "save_strategy": "no", "logging_strategy": "no"} | options
    return transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=4, **options
    )


def loader(n: int = 22, **options: Any) -> ShmLoader[Any]:
    # the Trainer collects the batches of an accumulation while it still holds those of the previous one
    return ShmLoader(Numbers(n), batch_size=4, seed=7, num_workers=1, prefetch_factor=8, **options)


def expected_facts(num_epochs: int) -> list[Any]:
    with ShmLoader(Numbers(), batch_size=4, seed=7, shuffle=True) as alone:
        return [facts(batch) for _ in range(num_epochs) for batch in alone]


def test_trainer_trains_on_the_loaders_batches(tmp_path: Path) -> None:
    model = Model()
    with loader(shuffle=True) as training, loader(10) as validation:
        trainer = Trainer(training, validation, model=model, args=arguments(tmp_path, gradient_accumulation_steps=4))
        result = trainer.train()
        assert training.stats()["batches"] == 12
        assert training.stats()["num_copied_out"] == 0
        trainer.evaluate()
    assert [index for batch in model.evaluated for index in batch[0]] == list(range(10))
    assert result.global_step == 4, "two updates per epoch, the second over two batches"
    assert model.seen == expected_facts(2)


class KeepState(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]  # transformers may be without types
    """Saves the loader's state with each of the Trainer's checkpoints."""

    def on_save(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
        path.write_text(json.dumps(train_dataloader.state_dict()))


@pytest.mark.parametrize("step", [2, 8])
def test_trainer_resumes_in_the_middle_of_an_epoch(step: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": step, "max_steps": step}
    with loader(shuffle=True) as training, loader(10) as validation:
        args = arguments(tmp_path, **options)
        Trainer(training, validation, model=Model(), args=args, callbacks=[KeepState()]).train()
    model, checkpoint = Model(), tmp_path / f"checkpoint-{step}"
    with loader(shuffle=True) as training, loader(10) as validation:
        training.load_state_dict(json.loads((checkpoint / "loader.json").read_text()))
        args = arguments(tmp_path, ignore_data_skip=True)
        Trainer(training, validation, model=model, args=args).train(resume_from_checkpoint=str(checkpoint))
    assert model.seen[: 12 - step] == expected_facts(2)[step:]


def test_two_ranks_of_a_trainer_read_the_batches_of_one(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = (rank["seen"] for rank in run_ranks("trainer"))
    assert len(first) == len(second) == 6
    with ShmLoader(Numbers(), batch_size=8, seed=5, shuffle=True) as alone:
        epochs = [[facts(batch) for batch in alone] for _ in range(2)]
    for epoch in range(2):
        for step in range(2):  # the third is uneven and padded
            both = zip(first[3 * epoch + step], second[3 * epoch + step], strict=True)
            assert [mine + other for mine, other in both] == epochs[epoch][step]
