"""Operational cases: a storm of cancellations, a very long prompt, eviction under pressure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sim.experiment.scenarios.checks import all_answered, falls, is_at_least, is_at_most, is_exactly
from sim.experiment.scenarios.scenario import BLOCK_SIZE, Arms, Check, Scale, Scenario
from sim.report import seconds
from sim.setup import Setup

# -- S53 --------------------------------------------------------------------------------------------------------------

LEAVING = 0.8  # of all who are there when the storm begins


def _storm(scale: Scale) -> Mapping[str, Setup]:
    workload = f"fixed,num_prompt_tokens={scale.short},num_output_tokens={2 * scale.answer}"
    calm = replace(scale.setup(workload, "poisson"), rate=scale.num_requests / scale.pace)
    storm = f"storm={LEAVING},at={2 * scale.pace},within={scale.pace}"
    return {"calm": calm, "storm": replace(calm, transforms=(storm,))}


def _all_comes_back(arms: Arms, scale: Scale) -> Sequence[Check]:
    calm, storm = arms.values()
    gone = [n - done for n, done in zip(storm.values("num_requests"), storm.values("num_completed"), strict=True)]
    accounted = storm.values("num_aborted") == gone
    freed, answer = max(storm.values("cancel_latency.p99")), calm.mean("e2e.mean")
    return [
        all_answered((calm,)),
        is_at_least(storm, "num_aborted", scale.num_requests // 4, "cancelled"),
        Check("storm: everybody else answered", "yes" if accounted else "no", accounted),
        is_exactly(storm, "num_blocks_left", 0, "blocks held at the end"),
        Check(
            f"storm: from word to freed blocks, p99, at most a quarter of an answer's {seconds(answer)}",
            seconds(freed),
            freed <= 0.25 * answer,
            is_timed=True,
        ),
        falls(calm, storm, "duration", 0.9, "time until all who stay are answered"),
    ]


CANCELLATION_STORM = Scenario(
    "cancellation-storm",
    "S53",
    "Four in five clients hang up at once: does all they held come back, and do the others gain by it?",
    "workload",
    _storm,
    _all_comes_back,
)

# -- S54 --------------------------------------------------------------------------------------------------------------


def _long_prompt(scale: Scale) -> Mapping[str, Setup]:
    """A prompt that takes a whole step, and one that fits into no pool, among many short ones."""
    chat = f"chat:{scale.short}+{scale.answer // 2}"
    turns = "/".join([*[chat] * 7, f"long:{scale.giant}+4", *[chat] * 7, f"beyond:{2 * scale.giant - 100}+4"])
    num_blocks = 7 * scale.giant // (4 * BLOCK_SIZE)
    batching = {"whole": "chunked", "in chunks": f"stall_free,chunk_size={scale.giant // 16}"}
    return {
        name: scale.setup(
            f"cycle,turns={turns}",
            scale.users(scale.num_slots),
            batching=each,
            num_blocks=num_blocks,
            max_num_batched_tokens=scale.giant,
            max_model_len=2 * scale.giant,
        )
        for name, each in batching.items()
    }


def _nobody_stalls(arms: Arms, scale: Scale) -> Sequence[Check]:
    whole, chunks = arms.values()
    num = scale.num_requests // 16
    return [
        *(is_exactly(arm, "num_rejected", num, "refused, as no pool holds it") for arm in (whole, chunks)),
        *(is_exactly(arm, "num_completed", 15 * num, "answered") for arm in (whole, chunks)),
        falls(whole, chunks, "classes.chat.itl.p99", 0.8, "gaps between others' tokens, p99,"),
    ]


LONG_PROMPT = Scenario(
    "long-prompt",
    "S54",
    "A very long prompt, and one that can never fit: who stalls, and is the hopeless one told so?",
    "engine.batching",
    _long_prompt,
    _nobody_stalls,
)

# -- S55 --------------------------------------------------------------------------------------------------------------

NUM_PREFIXES, ROUNDS = 4, 6


def _pressure(scale: Scale) -> Mapping[str, Setup]:
    """Prefixes in turn, which is what a least-recently-used order takes worst."""
    lengths = f"prefix_tokens={scale.long},own_tokens={scale.short},output_tokens={scale.answer}"
    own = -(-(scale.short + scale.answer) // BLOCK_SIZE)
    prefix = scale.long // BLOCK_SIZE
    rooms = {"room for all": NUM_PREFIXES * (prefix + ROUNDS * own), "one too few": (NUM_PREFIXES - 1) * prefix + own}
    return {
        name: scale.setup(
            f"repeated-prefix,num_prefixes={NUM_PREFIXES},{lengths}",
            scale.users(1),
            num_requests=NUM_PREFIXES * ROUNDS,
            num_blocks=num_blocks,
            max_num_batched_tokens=scale.long,
        )
        for name, num_blocks in rooms.items()
    }


def _the_cliff_is_told(arms: Arms, scale: Scale) -> Sequence[Check]:
    roomy, tight = arms.values()
    found = NUM_PREFIXES * (ROUNDS - 1) * scale.long
    return [
        all_answered((roomy, tight)),
        is_exactly(roomy, "num_cached_tokens", found, "prompt tokens found in the cache"),
        is_exactly(roomy, "num_evicted_blocks", 0, "blocks evicted"),
        is_at_most(tight, "num_cached_tokens", 0.1 * found, "prompt tokens found in the cache"),
        is_at_least(tight, "num_evicted_blocks", 0.9 * found / BLOCK_SIZE, "blocks evicted, as many as were lost,"),
    ]


EVICTION_PRESSURE = Scenario(
    "eviction-pressure",
    "S55",
    "Prefixes in turn, and a pool too small by one: how much is still found, and is thrashing told?",
    "engine.num_blocks",
    _pressure,
    _the_cliff_is_told,
    is_counted=True,
)
