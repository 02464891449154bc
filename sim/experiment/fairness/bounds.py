"""How far apart a policy promises to keep two who both wait, in charged tokens: what the theorems say of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from policies.catalogue import find, knobs, parameters
from policies.config import EngineConfig
from policies.named import counts_by_name
from sim.experiment.fairness.accounts import Accounts, Prices

FAIR_AMONG_CLIENTS = ("vtc", "drr", "dlpm")


class Bound(NamedTuple):
    """In charged tokens, and where it is from."""

    tokens: float
    rule: str


def prices_of(config: EngineConfig) -> Prices:
    """As the scheduling policy charges, or the usual ones where it charges nobody."""
    told = _settings(config.scheduling)
    names = ("input_price", "output_price", "charge_cached", "charge_recompute")
    weights = counts_by_name("weights", told.get("weights", ""))
    return Prices(**{name: told[name] for name in names if name in told}, weights=weights)


def bound_of(config: EngineConfig, kind: str, accounts: Sequence[Accounts]) -> Bound | None:
    """None where the policy promises nothing to groups of this kind: wfq does only with one request at a time."""
    name, told, prices = config.scheduling.partition(",")[0], _settings(config.scheduling), prices_of(config)
    if name not in FAIR_AMONG_CLIENTS or kind != "client":
        return None
    prompt = max(each.largest_prompt for each in accounts)
    memory = min(max(each.num_kv_tokens for each in accounts), config.max_num_seqs * config.max_model_len)
    largest = max(prices.input_price * prompt, prices.output_price * memory)
    if name == "vtc":
        return Bound(
            2.0 * largest, "VTC's theorem: twice the longest prompt's price or that of a memory full of answers"
        )
    if name == "dlpm":
        return Bound(2.0 * (largest + told["quantum"]), "DLPM's: as VTC's, and two quanta")
    turn = told["quantum"] * max((1, *prices.weights.values()))
    in_flight = max(each.most_in_flight for each in accounts)
    return Bound(2.0 * in_flight + turn, "DRR's: twice what one client ever had running, and a quantum")


def _settings(spec: str) -> dict[str, Any]:
    """Of a scheduling policy, defaults included."""
    defaults = {name: each.default for name, each in parameters(find("scheduling", spec.partition(",")[0])).items()}
    return {**defaults, **knobs("scheduling", spec)}
