"""The stage engine: run stages on items, for pipelines and for the fluent remote reader.

    Each         a function of each item
    Expanding    makes more or fewer items, or another order: Filter, FlatMap, BufferedShuffle (item_stages.py), ...

Stages pass items to each other directly. All stages of a run share a `StageContext`, whose `origin` tells where the current item
came from: the source sets it, and so does a stage that delays items or makes several of one. So an error names the right item, and
items need no wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shmload.worker.failure import Failure, stop_iteration_error

Handler = Callable[[Exception], bool]  # True leaves the failed item out, False ends the items
DROP = object()  # replaces an item that is left out
PASS_END = object()  # replaces an item that ends the pass


@dataclass(frozen=True)
class Each:
    """A stage that applies a function to each item.

    Attributes:
        name: for messages.
        function: item -> item; DROP leaves it out.
        handler: handles an item that fails: True leaves it out, False ends the items; None leaves it to the StageContext.
    """

    name: str
    function: Callable[[Any], Any]
    handler: Handler | None = None


class FailedItem(NamedTuple):
    """A placeholder for an item that could not be made. Stages pass it on, so that the other items continue."""

    failure: Failure


class StageContext:
    """The context that the stages of a run share.

    Attributes:
        origin: where the current item came from: its position in the sequence, or its number.
        num_async_maps: number of the stages so far whose items are made by concurrent tasks.
    """

    origin: Any = None
    num_async_maps = 0

    def failed(self, error: Exception, stage: str, handler: Handler | None = None) -> Any:
        """Return the replacement of the current item, or raise the error.

        Args:
            error: the error that the stage raised.
            stage: name of the stage, or empty for the source.
            handler: the stage's handler.
        """
        raise NotImplementedError


class Expanding:
    """A stage that makes more or fewer items, or another order."""

    @property
    def kind(self) -> str:
        """Return a description of the stage without its functions, as part of a pipeline's identity."""
        return type(self).__name__

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        """Yield the stage's output, in order.

        Args:
            items: the items of a block, or of a pass.
            name: name of the stage, for messages.
            context: the context that all stages share.
        """
        raise NotImplementedError


Run = tuple[str, Expanding | list[Each]]  # an expanding stage with its name, or neighboring functions with an empty name


def group_stages(stages: Iterable[tuple[str, Expanding | Each]]) -> list[Run]:
    """Group stages, each given with its name, for `run_stages`, so that neighboring functions run in one loop."""
    runs: list[Run] = []
    for name, stage in stages:
        if isinstance(stage, Expanding):
            runs.append((name, stage))
        elif runs and isinstance(functions := runs[-1][1], list):
            functions.append(stage)
        else:
            runs.append(("", [stage]))
    return runs


def run_stages(items: Iterator[Any], runs: Iterable[Run], context: StageContext) -> Iterator[Any]:
    """Return an iterator over the items after they have passed through all stages. Nothing runs before it is advanced.

    Args:
        items: the items of the source.
        runs: a result of `group_stages`.
        context: the context that the source and all stages share.
    """
    for name, run in runs:
        items = _mapped(items, run, context) if isinstance(run, list) else run.run(items, name, context)
    return items


def _mapped(items: Iterator[Any], stages: Sequence[Each], context: StageContext) -> Iterator[Any]:
    stage = stages[0]
    for item in items:
        if type(item) is not FailedItem:
            try:
                for stage in stages:
                    item = stage.function(item)
                    if item is DROP:
                        break
            except Exception as error:
                item = context.failed(error, stage.name, stage.handler)
            if item is DROP:
                continue
            if item is PASS_END:
                return
        yield item


def apply_functions(stages: Iterable[Each], value: Any, name: Callable[[int], str] | None = None, key: int = 0) -> Any:
    """Apply functions to a value, one after the other, and return the result. A note on an exception names function and value.

    Args:
        stages: the functions.
        value: the first one's argument.
        name: key -> name of the value.
        key: key of the value.
    """
    stage = None
    try:
        for stage in stages:
            value = stage.function(value)
    except Exception as error:
        assert stage is not None
        error = with_note(error, stage.name, "" if name is None else name(key))
        raise error
    return value


def with_note(error: Exception, stage: str, item: str = "") -> Exception:
    """Return an exception with a note that names its stage and item: the same one, or a RuntimeError in place of StopIteration.

    Args:
        error: the exception.
        stage: name of the stage that raised it, or empty for the source.
        item: name of the item.
    """
    if isinstance(error, StopIteration):  # which would end the items
        error = stop_iteration_error(error, f"the function of {stage}" if stage else "reading the source")
    error.add_note(f"shmload: {', of '.join(filter(None, (stage, item)))}")
    return error
