"""What each group of requests was served and held, heard from a journal line by line.

Service is what fair policies charge: prompt tokens computed for the first time, output tokens at a price of their own.
Two groups are compared over every stretch of time in which both have somebody waiting: how far apart what they got
came, which is what VTC and DRR bound (T54, T55). A block that several requests share counts for each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a token, and what is paid for; as vtc, drr and dlpm have them. Weights divide, 1 unless given."""

    input_price: int = 1
    output_price: int = 2
    charge_cached: bool = False
    charge_recompute: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)


class Member(NamedTuple):
    """A request's group, and the length that its answer came to have."""

    group: str
    num_output_tokens: int


@dataclass(slots=True)
class Bearer:
    """One request, as far as the journal has told."""

    group: str
    num_prompt_tokens: int
    worth: int  # all that it will have been served
    farthest: int = 0  # tokens paid for
    num_blocks: int = 0
    is_waiting: bool = True


class Begun(NamedTuple):
    """A step, or equal ones. Blocks taken on the way count from its beginning, `excess` block-steps too much."""

    time: float
    repeat: int
    excess: Mapping[str, float]


class Accounts:
    """By group. What is said of pairs, and of flights, is not about the group `pooled`, which is many clients'."""

    def __init__(self, members: Mapping[str, Member], prices: Prices | None = None, pooled: str = "") -> None:
        self.service: dict[str, int] = defaultdict(int)
        self.block_seconds: dict[str, float] = defaultdict(float)
        self.farthest_apart = 0.0
        self.most_in_flight = 0  # the most that the running requests of one group were ever worth
        self.largest_prompt = 0
        self.num_kv_tokens = 0
        self._members, self._prices, self._pooled = members, prices or Prices(), pooled
        self._block_size = 1
        self._bearers: dict[str, Bearer] = {}
        self._waiting: dict[str, int] = defaultdict(int)
        self._held: dict[str, int] = defaultdict(int)
        self._flights: dict[str, int] = defaultdict(int)
        self._stretches: dict[tuple[str, str], tuple[float, float]] = {}
        self._begun: dict[int, Begun] = {}
        self._now = 0.0

    def hear(self, line: Line) -> None:
        if "journal" in line:
            self._block_size = line["config"]["block_size"]
            self.num_kv_tokens = line["config"]["num_blocks"] * self._block_size
            return
        self._let_time_pass(line["now"])
        if "add" in line and "refused" not in line:
            self._come(line)
        elif "plan" in line:
            self._compare()
            self._serve(line)
        elif "update" in line or "fail" in line:
            self._end(line["update"] if "update" in line else line["fail"], line["now"])
        elif line.get("reset"):
            for bearer in self._bearers.values():
                self._yield(bearer)
        for name, _ in line.get("left", ()):
            self._leave(name)

    def _let_time_pass(self, now: float) -> None:
        for group, num_blocks in self._held.items():
            self.block_seconds[group] += num_blocks * (now - self._now)
        self._now = now

    def _come(self, line: Line) -> None:
        group, num_outputs = self._members[line["add"]]
        worth = self._prices.input_price * line["prompt"] + self._prices.output_price * num_outputs
        self._bearers[line["add"]] = Bearer(group, line["prompt"], worth)
        self._waiting[group] += 1
        self.largest_prompt = max(self.largest_prompt, line["prompt"])

    def _compare(self) -> None:
        """Before a step is decided: the pairs of whom both have somebody waiting."""
        present = sorted(group for group, num in self._waiting.items() if num and group != self._pooled)
        stretches = {}
        for pair in combinations(present, 2):
            one, other = (self.service[group] / self._prices.weights.get(group, 1) for group in pair)
            low, high = self._stretches.get(pair, (one - other, one - other))
            stretches[pair] = low, high = min(low, one - other), max(high, one - other)
            self.farthest_apart = max(self.farthest_apart, high - low)
        self._stretches = stretches

    def _serve(self, line: Line) -> None:
        for name in line.get("preempted", ()):
            self._yield(self._bearers[name])
        for name, num_cached, resumed in line.get("admitted", ()):
            self._enter(self._bearers[name], num_cached, resumed)
        repeat, excess = line["repeat"], dict[str, float]()
        for name, start, num_tokens, *blocks in line["chunks"]:
            bearer, num_new = self._bearers[name], len(blocks[0]) if blocks else 0
            self._charge(bearer, start, start + num_tokens + repeat - 1)
            bearer.num_blocks += num_new
            self._held[bearer.group] += num_new
            if repeat > 1 and num_new:
                excess[bearer.group] = excess.get(bearer.group, 0.0) + self._steps_before(start, num_new)
        self._begun[line["plan"]] = Begun(line["now"], repeat, excess)

    def _enter(self, bearer: Bearer, num_cached: int, resumed: bool) -> None:
        self._waiting[bearer.group] -= 1
        bearer.is_waiting = False
        if resumed or not self._prices.charge_cached:
            bearer.farthest = max(bearer.farthest, num_cached)
        self._flights[bearer.group] += bearer.worth
        if bearer.group != self._pooled:
            self.most_in_flight = max(self.most_in_flight, self._flights[bearer.group])

    def _charge(self, bearer: Bearer, start: int, end: int) -> None:
        """What was not paid for up to a position; computing the last of a prompt yields the first output."""
        begin = bearer.farthest if self._prices.charge_cached else max(start, bearer.farthest)
        num_prompt = max(0, min(end, bearer.num_prompt_tokens) - begin)
        num_output = max(0, end - max(begin, bearer.num_prompt_tokens - 1))
        due = self._prices.input_price * num_prompt + self._prices.output_price * num_output
        self.service[bearer.group] += due
        bearer.farthest = max(bearer.farthest, end)

    def _steps_before(self, start: int, num_new: int) -> int:
        """Of a repeat from a position on: steps before each new block is taken, added up."""
        first = -start % self._block_size
        return sum(first + index * self._block_size for index in range(num_new))

    def _end(self, step: int, now: float) -> None:
        time, repeat, excess = self._begun.pop(step)
        for group, num_steps in excess.items():
            self.block_seconds[group] -= num_steps * (now - time) / repeat

    def _yield(self, bearer: Bearer) -> None:
        if bearer.is_waiting:
            return
        self._give_back(bearer)
        bearer.is_waiting = True
        self._waiting[bearer.group] += 1
        if self._prices.charge_recompute:
            bearer.farthest = 0

    def _leave(self, name: str) -> None:
        bearer = self._bearers.pop(name, None)
        if bearer is None:
            return
        if bearer.is_waiting:
            self._waiting[bearer.group] -= 1
        else:
            self._give_back(bearer)

    def _give_back(self, bearer: Bearer) -> None:
        self._held[bearer.group] -= bearer.num_blocks
        self._flights[bearer.group] -= bearer.worth
        bearer.num_blocks = 0
