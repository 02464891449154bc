"""What a step costs the host, policy by policy, at 256 running and 2,000 waiting: CPU microseconds.

    python benchmarks/policies_speed.py [--menu MENU] [--steps N]

Two kinds of step are timed, `schedule` and `update` together. Turnover: every slot is taken, four answers end in each
step and four of the waiting come in. Crowded: slots are free but memory is not, so in each step whoever is first is
looked for, and does not fit. Prompts have 640 to 1,024 tokens, the first 512 of which are shared within each of 50
clients. Times are of the menu's default, whose steps are taken in turn with the others'.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from policies.catalogue import MENU, build, make  # noqa: E402
from policies.config import MENUS, EngineConfig  # noqa: E402
from policies.prompt import ContentPrompt  # noqa: E402
from policies.types import Context, Request, StepOutput  # noqa: E402

NUM_RUNNING, NUM_WAITING, NUM_CLIENTS = 256, 2000, 50
CONTENT, SHARED_IDS = 128, 4  # tokens a content id; ids that a client's prompts share
TURNOVER = 4  # answers that end in a step
ROOMY, CROWDED = 60_000, 7_600  # blocks: more than are ever needed; those that about 256 fill


def requests(num_outputs: int) -> Iterator[Request]:
    """Clients in turn, two classes, a third of them with a deadline, all with a prediction."""
    number = 0
    while True:
        client, num_own = number * number % NUM_CLIENTS, 1 + number * 7 % 4
        ids = [client * 10 + i for i in range(SHARED_IDS)] + [(number + NUM_CLIENTS) * 10 + i for i in range(num_own)]
        name = f"client-{client}"
        yield Request(
            str(number), 0.0, ContentPrompt(len(ids) * CONTENT, tuple(ids), CONTENT), num_outputs,
            client_id=name, class_name=("interactive", "batch")[number % 2], context=Context(tenant=name),
            deadline=float(number * 5 % 97) if number % 3 == 0 else None,
            predicted_output_tokens=num_outputs + number * 11 % 17,
        )  # fmt: skip
        number += 1


class Load:
    """An engine whose line is kept as long as it was."""

    def __init__(self, menu: str, name: str, num_outputs: int, num_blocks: int, max_num_seqs: int) -> None:
        settings: dict[str, Any] = {menu: name, "num_blocks": num_blocks, "max_num_seqs": max_num_seqs}
        if menu == "allocation":
            settings["enable_prefix_caching"] = make(menu, name).shares_blocks
        self.engine = build(EngineConfig(max_num_batched_tokens=16_384, max_model_len=2048, **settings))
        self._requests = requests(num_outputs)
        self.now = 0.0

    def fill(self) -> None:
        for _ in range(NUM_WAITING + NUM_RUNNING - sum(1 for _ in self.engine.states)):
            self.engine.add(next(self._requests), self.now)

    def step(self) -> float:
        """CPU seconds of one step; time goes on by 10 ms."""
        engine = self.engine
        begin = time.process_time()
        plan = engine.schedule(self.now)
        self.now += 0.01
        if plan is not None:
            engine.update(plan, StepOutput(0.01), self.now)
        spent = time.process_time() - begin
        engine.drain_records()
        return spent


def turnover(menu: str, name: str) -> Load:
    """Answers have begun in turn, four a step, so that four end in each."""
    load = Load(menu, name, NUM_RUNNING // TURNOVER, ROOMY, NUM_RUNNING)
    for _ in range(2 * NUM_RUNNING // TURNOVER):
        load.fill()
        load.step()
    return load


def crowded(menu: str, name: str) -> Load:
    """Memory for about 256, slots for twice as many."""
    load = Load(menu, name, 1000, CROWDED, 2 * NUM_RUNNING)
    load.fill()
    for _ in range(20):
        load.step()
    return load


class Cost(NamedTuple):
    """Of a step, and how many ran in it: an entry that lets fewer in has less to do."""

    seconds: float
    num_running: int


def measure(loads: dict[str, Load], num_steps: int) -> dict[str, Cost]:
    """A step of each in turn, so that a busy machine slows all alike. A quarter of the steps take no longer."""
    spent: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(num_steps):
        for name, load in loads.items():
            load.fill()
            spent[name].append(load.step())
    return {name: Cost(quantiles(spent[name], n=4)[0], len(load.engine.running)) for name, load in loads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--menu", choices=MENUS, action="append", help="only this one; may be given again")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    gc.disable()
    columns = [f"{kind}{what}" for kind in ("turnover", "crowded") for what in (", us", ", times", ", running")]
    table = Table("menu", "policy", *columns, box=None, padding=(0, 2, 0, 0))
    for menu in options.menu or MENUS:
        default = getattr(EngineConfig(), menu)
        found = [
            measure({name: kind(menu, name) for name in MENU[menu]}, options.steps) for kind in (turnover, crowded)
        ]
        for name in MENU[menu]:
            cells = list[str]()
            for costs in found:
                times = costs[name].seconds / costs[default].seconds
                cells += [f"{costs[name].seconds * 1e6:,.0f}", f"{times:.2f}", f"{costs[name].num_running}"]
            table.add_row(menu, name, *cells)
        gc.collect()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
