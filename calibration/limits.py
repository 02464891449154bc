"""Engine limits held against the records: a wrong one must show, for a fit would take it into its prices.

The log of steps cannot hold a step that is larger than the limits; token times cannot hold an answer that the engine
would not have begun; and the share of the pool in use, where it is logged, tells the size of the pool.
"""

from __future__ import annotations

from statistics import mean

from calibration.forced import Forced
from calibration.records import MeasuredRun
from policies.config import EngineConfig

MOST_CONTRADICTIONS = 0.025  # of all requests; the right limits leave up to 0.011 on a real server
LEAST_CONTRADICTIONS = 4
USAGE_TOLERANCE = 0.15
LEAST_USAGE = 0.02  # of the pool: below, rounding hides what it says


def check_log(run: MeasuredRun, config: EngineConfig) -> None:
    """Raises ValueError where a logged step is larger than the limits allow."""
    if not run.steps:
        return
    tokens = max(step.num_tokens for step in run.steps)
    requests = max(step.num_prefills + step.num_decodes for step in run.steps)
    if tokens > config.max_num_batched_tokens:
        raise ValueError(
            f"run {run.name!r} logged a step of {tokens} tokens, but max_num_batched_tokens is said to be "
            f"{config.max_num_batched_tokens}: correct it"
        )
    if requests > config.max_num_seqs:
        raise ValueError(
            f"run {run.name!r} logged a step of {requests} requests, but max_num_seqs is said to be "
            f"{config.max_num_seqs}: correct it"
        )


def check_replay(run: MeasuredRun, config: EngineConfig, forced: Forced) -> None:
    """Raises ValueError where answers began that the limits forbid, or did not that they allow."""
    num = forced.early + forced.late
    if num >= LEAST_CONTRADICTIONS and forced.contradictions > MOST_CONTRADICTIONS:
        limits = f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens}, "
        limits += f"{config.num_blocks} blocks of {config.block_size}"
        what = "earlier than they allow" if forced.early > forced.late else "later than they explain"
        raise ValueError(
            f"run {run.name!r} contradicts its engine limits ({limits}): {num} of {forced.num_requests} answers began "
            f"{what}. A wrong limit swamps any cost: correct it"
        )
    _check_usage(run, config, forced)


def _check_usage(run: MeasuredRun, config: EngineConfig, forced: Forced) -> None:
    logged = [step.kv_usage for step in run.steps if step.kv_usage is not None]
    if not logged or not forced.usage or mean(logged) < LEAST_USAGE:
        return
    ratio = mean(forced.usage) / mean(logged)
    if abs(ratio - 1.0) > USAGE_TOLERANCE:
        raise ValueError(
            f"run {run.name!r} logged {mean(logged):.1%} of its KV blocks in use, the replay {mean(forced.usage):.1%} "
            f"of {config.num_blocks}: num_blocks should be near {round(config.num_blocks * ratio)}"
        )
