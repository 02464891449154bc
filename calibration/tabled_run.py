"""A recorded vLLM run played by the kernel tables of its GPU, and the one constant that it may lend to another GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibration.figures import Figure, compare, measured, simulated
from calibration.importers.files import read_object
from calibration.importers.kernel_tables import KernelTables, read_kernel_tables
from calibration.importers.llmservingsim import read_llmservingsim
from calibration.kernel_tables import tabled_cost
from calibration.records import MeasuredRun
from calibration.replayed import config_of, replay
from policies.config import EngineConfig
from sim.capacity import kv_blocks
from sim.cost.graphs import largest_capture
from sim.cost.tabled import TabledCost
from sim.hardware import device

LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}  # of vLLM, where the run does not say
BLOCK_SIZE, UTILIZATION = 16, 0.9
PROBE = 0.5e-3  # seconds a step; errors follow it in a straight line


@dataclass(frozen=True, slots=True)
class TabledRun:
    """A run, its engine, and the cost of its steps from tables alone."""

    run: MeasuredRun
    config: EngineConfig
    cost: TabledCost

    def figures(self, per_step: float = 0.0) -> list[Figure]:
        """Recorded and predicted, with so many seconds a step that no kernel explains."""
        played = replay(self.run, self.config, replace(self.cost, per_step=per_step), None)
        return compare(measured(self.run), simulated(played))

    def fitted_per_step(self) -> float:
        """Seconds a step at which the means of TPOT and E2E are right on the whole; 0 where kernels alone take longer.

        One run of one load tells no more: a time for each request would be a guess.
        """
        without = self._excess(0.0)
        if without >= 0.0:
            return 0.0
        return PROBE * without / (without - self._excess(PROBE))

    def _excess(self, per_step: float) -> float:
        errors = {figure.name: figure.error for figure in self.figures(per_step)}
        return 0.5 * (errors["tpot mean"] + errors["e2e mean"])


def tabled_run(
    tables_folder: Path, run_folder: Path, given: Mapping[str, Any] | None = None, equal_contexts: bool = False
) -> TabledRun:
    """`given`: engine settings that the run's meta.json does not tell, or others than vLLM's defaults. Contexts that
    differ are priced where there is a table of them, unless `equal_contexts`. Raises ValueError for what does not fit.
    """
    tables, run = read_kernel_tables(tables_folder), read_llmservingsim(run_folder)
    config = config_of(run, {**_not_told(run, run_folder, tables, given or {}), **(given or {})})
    captured = largest_capture(config.max_num_seqs, config.max_num_batched_tokens)
    cost = tabled_cost(tables, _lengths(run), captured)
    return TabledRun(run, config, replace(cost, skew=None) if equal_contexts else cost)


def _lengths(run: MeasuredRun) -> Sequence[tuple[int, int]]:
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in run.completed]


def _not_told(run: MeasuredRun, folder: Path, tables: KernelTables, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's defaults where the run says nothing; blocks by what memory leaves."""
    meta = read_object(folder / "meta.json")
    scheduler = (meta.get("resolved_config") or {}).get("scheduler_config") or {}
    found: dict[str, Any] = {"async_depth": 2 if scheduler.get("async_scheduling", True) else 1}
    if "num_blocks" not in run.engine:
        found |= {"block_size": BLOCK_SIZE, "enable_prefix_caching": True}
    if "num_blocks" not in run.engine and "num_blocks" not in given:
        limits = [run.engine.get(name, default) for name, default in LIMITS.items()]
        found["num_blocks"] = kv_blocks(tables.model, device(tables.gpu), BLOCK_SIZE, UTILIZATION, *limits)
    return found
