"""Choose the engine that runs a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmload.pipeline.block_engine import BlockEngine
from shmload.pipeline.block_positions import OrderedPosition, UnorderedPosition
from shmload.pipeline.block_sources import KeyedBlocks
from shmload.pipeline.fed_blocks import FedBlocks
from shmload.pipeline.keyed_engine import KeyedEngine
from shmload.pipeline.pipeline_engine import PipelineEngine
from shmload.pipeline.plan import Plan


def engine_of(plan: Plan, options: Mapping[str, Any], stage_places: Sequence[tuple[str, str]]) -> PipelineEngine:
    """Return the engine for a plan.

    Args:
        plan: the plan to run.
        options: arguments for ShmLoader.
        stage_places: (name, where it runs) of each stage, for displays.
    """
    if not plan.is_expanding:
        return KeyedEngine(plan, options, stage_places)
    if not plan.is_in_order:
        return BlockEngine(plan, FedBlocks.of(plan, options, stage_places), UnorderedPosition())
    blocks = FedBlocks.of(plan, options, stage_places) if plan.is_streamed else KeyedBlocks(plan, options, stage_places)
    return BlockEngine(plan, blocks, OrderedPosition())
