"""The replica: order at one instant, cancellation, steps scheduled ahead, equal steps at once."""

from __future__ import annotations

import pytest
import simpy

from policies.catalogue import build
from policies.config import EngineConfig
from policies.prompt import LengthPrompt
from policies.types import FinishReason, Request, RequestRecord
from sim.cost import AffineCost, StepWork
from sim.executor import SimulatedExecutor, delay_until
from sim.replica import Late, Replica
from sim.simulate import simulate
from sim.workload.generate import from_lengths


class World:
    """A replica whose steps last a second, and everybody who left it."""

    def __init__(self, jumps: bool = True, **settings: object) -> None:
        values = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
        }
        self.env = simpy.Environment()
        self.engine = build(EngineConfig.from_dict({**values, **settings}))
        self.executor = SimulatedExecutor(AffineCost(per_step=1.0), overlap=self.engine.config.async_depth > 1)
        self.records: dict[str, RequestRecord] = {}
        self.replica = Replica(self.env, self.engine, self.executor, self.heard, jumps)

    def heard(self, record: RequestRecord) -> None:
        self.records[record.request_id] = record

    def send(self, name: str, at: float, prompt: int = 4, output: int = 3) -> None:
        request = Request(name, at, LengthPrompt(prompt), max_tokens=32)
        self.executor.expect(request, output)
        self._at(at, lambda: self.replica.submit(request))

    def cancel(self, name: str, at: float) -> None:
        self._at(at, lambda: self.replica.cancel(name))

    def _at(self, time: float, action: object) -> None:
        def process() -> object:
            yield self.env.timeout(time)
            action()  # type: ignore[operator]

        self.env.process(process())  # type: ignore[arg-type]


def test_a_request_alone_takes_a_step_a_token() -> None:
    world = World()
    world.send("a", at=2.0, output=3)
    world.env.run()
    record = world.records["a"]
    assert (record.first_scheduled_time, record.first_token_time, record.finish_time) == (2.0, 3.0, 5.0)
    assert record.reason is FinishReason.STOP
    assert list(world.replica.step_ends) == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("jumps", [True, False])
def test_who_arrives_when_a_step_ends_is_in_the_next(jumps: bool) -> None:
    world = World(jumps)
    world.send("a", at=0.0, output=5)
    world.send("b", at=2.0, output=1)  # exactly at the end of the second step
    world.env.run()
    assert world.records["b"].first_scheduled_time == 2.0


def test_all_who_arrive_at_one_instant_share_the_first_step() -> None:
    world = World()
    for name in "abc":
        world.send(name, at=1.0, output=1)
    world.env.run()
    assert {record.finish_time for record in world.records.values()} == {2.0}


@pytest.mark.parametrize("jumps", [True, False])
def test_a_cancelled_request_gives_its_blocks_back_when_its_step_ends(jumps: bool) -> None:
    world = World(jumps)
    world.send("a", at=0.0, output=20)
    world.cancel("a", at=2.5)
    world.env.run()
    record = world.records["a"]
    assert (record.reason, record.finish_time, record.num_output_tokens) == (FinishReason.ABORT, 3.0, 2)
    assert world.engine.kv.num_free == world.engine.kv.num_blocks


def test_cancelled_during_the_step_that_would_have_finished_it() -> None:
    world = World()
    world.send("a", at=0.0, output=3)
    world.cancel("a", at=2.5)
    world.env.run()
    assert world.records["a"].reason is FinishReason.ABORT


def test_finished_at_the_instant_of_the_cancellation_counts_as_finished() -> None:
    """Order at one instant: update, aborts, arrivals, schedule."""
    world = World()
    world.send("a", at=0.0, output=3)
    world.cancel("a", at=3.0)
    world.env.run()
    assert world.records["a"].reason is FinishReason.STOP


def test_cancelled_while_waiting_never_runs() -> None:
    world = World(max_num_seqs=1)
    world.send("a", at=0.0, output=5)
    world.send("b", at=1.0)
    world.cancel("b", at=1.5)
    world.env.run()
    assert world.records["b"].first_scheduled_time is None
    assert world.records["a"].finish_time == 5.0


def test_static_batching_wakes_by_itself_for_a_group_that_is_not_full() -> None:
    world = World(batching="static,group_size=4,max_wait=2.5")
    world.send("a", at=1.0, output=2)
    world.env.run()
    assert world.records["a"].first_scheduled_time == 3.5


def test_scheduling_ahead_costs_one_wasted_token_and_hides_the_host() -> None:
    """Depth 2: a step lasts the longer of host and device, and an answer's end is seen one step late."""

    class HostAndDevice:
        provenance, band = "made up", 1.0

        def host_time(self, work: StepWork) -> float:
            return 0.75

        def device_time(self, work: StepWork) -> float:
            return 1.0

    def finish(depth: int) -> tuple[float, int]:
        workload = from_lengths([0.0], [4], [3], max_tokens=32)
        config = EngineConfig(num_blocks=64, block_size=4, max_model_len=64, async_depth=depth)
        run = simulate(config, workload, HostAndDevice())
        return run.records[0].finish_time, len(run.step_ends)

    assert finish(1) == (3 * 1.75, 3)
    assert finish(2) == (3.0, 4)


def test_late_happens_after_everything_else_at_its_instant() -> None:
    env, seen = simpy.Environment(), []

    def late() -> object:
        yield Late(env, 1.0)
        seen.append("late")

    def normal() -> object:
        yield env.timeout(1.0)
        yield env.timeout(0.0)
        seen.append("normal, twice")

    env.process(late())  # type: ignore[arg-type]
    env.process(normal())  # type: ignore[arg-type]
    env.run()
    assert seen == ["normal, twice", "late"]


@pytest.mark.parametrize(("now", "end"), [(0.1, 0.3), (1e-9, 1e9), (0.7, 0.7), (123.456, 123.457), (0.0, 5e-324)])
def test_the_delay_lands_exactly(now: float, end: float) -> None:
    assert now + delay_until(now, end) == end


def test_a_wedged_engine_names_who_was_never_answered() -> None:
    """Only with the refusal switched off can a request wait forever; the run ends, and says so."""
    config = EngineConfig(num_blocks=2, block_size=4, max_model_len=64, refuse_unfittable=False)
    run = simulate(config, from_lengths([0.0], [40], [1]), AffineCost(per_step=1.0))
    assert run.unfinished == ("0",)
    assert run.summary.num_unfinished == 1 and run.summary.num_completed == 0
