"""What queues around the engines: gateway, API servers with their tokenisers and stream loops, and the links between.

    client -> gateway -> API loop -> tokeniser -> engine ... steps ... -> stream loop -> gateway -> client

A client that gives up is heard of hop by hop on the same links: by the gateway, the API server, the engine. Whoever of
them has the request then drops it. In vLLM one event loop takes requests in and sends tokens out; here these are two,
so that streaming never delays what comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any

import simpy

from policies.types import Outcome, Request, RequestRecord, StepPlan
from sim.cluster import Cluster
from sim.replica import Moment, Process
from sim.stream import Deliveries, StreamLoop, merged
from sim.visit import Visit, abandoned
from sim.workload.sessions import ANSWERED
from sim.workload.workload import WorkItem


@dataclass(frozen=True, slots=True)
class FrontEndTimes:
    """Of a server like vLLM's, in seconds. None of the defaults is measured here.

    They are round numbers near what is public. BLIS's fit to another stack has 15.56 ms and 0.78 ms a request and
    45.9 us a token. One API process of vLLM sent 12,850 tokens a second of a 1B model on an A100, at most 78 us each
    (vLLM PR 12287, before its changes). Tokenisers take 1 to 20 us a token. Links are one way, and delay both ways.
    """

    client_link_time: float = 0.0  # client - gateway: latencies as seen at the gateway's door
    gateway_time_per_request: float = 0.2e-3  # routing; requests do not wait for each other
    server_link_time: float = 0.1e-3  # gateway - API server
    api_time_per_request: float = 1e-3  # HTTP, validation, chat template
    tokenise_time_per_request: float = 0.1e-3
    tokenise_time_per_token: float = 2e-6  # of the prompt
    engine_link_time: float = 0.1e-3  # API server - engine: serialised, to another process
    stream_time_per_request: float = 0.1e-3  # with its first token
    stream_time_per_token: float = 40e-6  # detokenised and sent
    num_api_servers: int = 1  # of each replica, each with an API loop, a pool of tokenisers and a stream loop
    num_tokenisers: int = 1  # of each API server
    max_concurrency: int | None = None  # requests past the gateway at once; the others wait there, in order

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name.startswith(("num_", "max_")):
                if value is not None and not (type(value) is int and value >= 1):
                    raise ValueError(f"{name} ({value}) must be a whole number, at least 1")
            elif not 0.0 <= value < math.inf:
                raise ValueError(f"{name} ({value}) must be a finite number of seconds, 0 or more")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def off(cls, **others: Any) -> FrontEndTimes:
        """Nothing takes time but what is said to, as theory likes it."""
        return cls(**{**{name: 0.0 for name in cls.__dataclass_fields__ if "_time" in name}, **others})

    def tokenise_time(self, request: Request) -> float:
        return self.tokenise_time_per_request + self.tokenise_time_per_token * request.prompt.num_tokens


class ApiServer:
    """One process of a replica. `numbers` and `hung_up` are by request: whose tokens it sends, and who left, when."""

    def __init__(self, env: simpy.Environment, times: FrontEndTimes) -> None:
        self.loop = simpy.Resource(env)
        self.tokenisers = simpy.Resource(env, times.num_tokenisers)
        self.stream = StreamLoop(times.stream_time_per_request, times.stream_time_per_token)
        self.numbers: dict[str, int] = {}
        self.hung_up: dict[str, float] = {}

    def expect(self, visit: Visit) -> None:
        self.numbers[visit.request.request_id] = visit.number
        self.stream.open(visit.number)

    def forget(self, request_id: str) -> None:
        self.numbers.pop(request_id, None)
        self.hung_up.pop(request_id, None)

    def send(self, names: Sequence[str], begin: float, ends: Sequence[float], link_time: float) -> None:
        """Tokens of steps with these ends, the first of which began at `begin`."""
        arrivals = [end + link_time for end in ends] if link_time else ends
        if not self.hung_up:
            self.stream.send([self.numbers[name] for name in names if name in self.numbers], arrivals)
            return
        # Who hung up meanwhile did so in the last step: equal steps are only taken at once up to the next event.
        self.stream.send(self._listening(names, math.nextafter(begin, math.inf)), arrivals[:-1])
        self.stream.send(self._listening(names, ends[-1]), arrivals[-1:])

    def _listening(self, names: Sequence[str], until: float) -> list[int]:
        return [self.numbers[name] for name in names if name in self.numbers and self.hung_up.get(name, until) >= until]


class FrontEnd:
    """Takes requests from clients to a cluster, and answers back; a Door, and the cluster's Listener.

    `on_record` hears of each request once no engine has it (any more), and of its replica; `on_answer`, if given, when
    its answer or refusal is with the client, or would be if that had not left.
    """

    def __init__(
        self,
        env: simpy.Environment,
        times: FrontEndTimes,
        num_replicas: int,
        answers_whole: bool,
        on_record: Callable[[int, RequestRecord], object],
        on_answer: Callable[[RequestRecord], object] | None = None,
    ) -> None:
        self.env = env
        self.times = times
        self.visits: list[Visit] = []
        self.gateway = simpy.Resource(env, times.max_concurrency) if times.max_concurrency else None
        self.servers = [[ApiServer(env, times) for _ in range(times.num_api_servers)] for _ in range(num_replicas)]
        self._answers_whole = answers_whole
        self._on_record = on_record
        self._on_answer = on_answer
        self._latest: dict[str, Visit] = {}  # by request id
        self._gone: dict[str, Visit] = {}  # clients that left, whose tokens may still be computed
        self._num_taken = [0] * num_replicas

    def connect(self, cluster: Cluster) -> None:
        """Whom to route and send to."""
        self._cluster = cluster

    # -- from the client to the engine ----------------------------------------------------------------------------

    def send(self, item: WorkItem) -> None:
        visit = Visit(len(self.visits), item)
        self.visits.append(visit)
        self._latest[item.request.request_id] = visit
        self._gone.pop(item.request.request_id, None)
        visit.process = self.env.process(self._come(visit))

    def _come(self, visit: Visit) -> Process:
        try:
            yield from self._pass_gateway(visit)
            yield from self._pass_api_server(visit)
        except simpy.Interrupt:
            self._drop(visit)

    def _pass_gateway(self, visit: Visit) -> Process:
        yield from self._spend(self.times.client_link_time)
        visit.gateway_in_time = self.env.now
        if self.gateway is not None:
            visit.slot = self.gateway.request()
            yield visit.slot
        yield from self._spend(self.times.gateway_time_per_request)
        visit.gateway_out_time = self.env.now
        visit.replica = self._cluster.choose(visit.request)
        visit.api = self._num_taken[visit.replica] % self.times.num_api_servers
        self._num_taken[visit.replica] += 1

    def _pass_api_server(self, visit: Visit) -> Process:
        assert visit.replica is not None
        times, api = self.times, self._api_server(visit)
        yield from self._spend(times.server_link_time)
        visit.api_in_time = self.env.now
        yield from self._use(api.loop, times.api_time_per_request)
        visit.api_out_time = self.env.now
        yield from self._use(api.tokenisers, times.tokenise_time(visit.request))
        visit.tokenised_time = self.env.now
        api.expect(visit)
        yield from self._spend(times.engine_link_time)
        self._cluster.submit(visit.replica, visit.item)

    def _use(self, resource: simpy.Resource, time: float) -> Process:
        with resource.request() as turn:
            if not turn.triggered:
                yield turn
            if time:
                yield self.env.timeout(time)

    def _spend(self, time: float) -> Process:
        if time:
            yield self.env.timeout(time)

    def _api_server(self, visit: Visit) -> ApiServer:
        assert visit.replica is not None and visit.api is not None
        return self.servers[visit.replica][visit.api]

    # -- cancelling -----------------------------------------------------------------------------------------------

    def hang_up(self, request_id: str) -> bool:
        visit = self._latest[request_id]
        if visit.left_time is not None or (visit.answer_time is not None and visit.answer_time <= self.env.now):
            return False
        visit.left_time = self.env.now
        self._gone[request_id] = visit
        self.env.process(self._cancel(visit))
        return True

    def _cancel(self, visit: Visit) -> Process:
        """Hop by hop, until one has the request or the engine is done with it."""
        assert visit.process is not None
        yield from self._spend(self.times.client_link_time)
        visit.gateway_cancel_time = self.env.now
        if visit.gateway_out_time is None:
            visit.process.interrupt()
            return
        self._free_slot(visit)
        yield from self._spend(self.times.server_link_time)
        visit.api_cancel_time = self.env.now
        if visit.tokenised_time is None:
            visit.process.interrupt()
            return
        if visit.record is not None:
            return
        self._api_server(visit).hung_up[visit.request.request_id] = self.env.now
        yield from self._spend(self.times.engine_link_time)
        visit.engine_cancel_time = self.env.now
        if visit.record is None:
            assert visit.replica is not None
            self._cluster.cancel(visit.replica, visit.request.request_id)

    def _drop(self, visit: Visit) -> None:
        """No engine has heard of it."""
        if visit.replica is not None:
            self._cluster.withdraw(visit.replica, visit.request)
        self._free_slot(visit)
        self._end(visit, abandoned(visit.request, self.env.now))

    def _free_slot(self, visit: Visit) -> None:
        if visit.slot is not None and self.gateway is not None:
            visit.slot.cancel()
            self.gateway.release(visit.slot)

    # -- from the engine to the client ----------------------------------------------------------------------------

    def added(self, index: int, request: Request, outcome: Outcome) -> None:
        visit = self._latest[request.request_id]
        visit.added_time = self.env.now

    def stepped(self, index: int, plan: StepPlan, ends: Sequence[float]) -> None:
        """Tokens were computed; each step of the plan gives one to each of those that sample."""
        names = list(compress(plan.request_ids, plan.samples))
        if self._gone and not self._gone.keys().isdisjoint(names):
            self._count_zombies(names, ends)
        if not self._answers_whole:
            for api in self.servers[index]:
                api.send(names, plan.time, ends, self.times.engine_link_time)

    def _count_zombies(self, names: Sequence[str], ends: Sequence[float]) -> None:
        for visit in (self._gone[name] for name in names if name in self._gone):
            assert visit.left_time is not None
            visit.num_zombie_tokens += sum(end > visit.left_time for end in ends)

    def left(self, index: int, record: RequestRecord) -> None:
        """It left its engine: what there is of its answer goes back."""
        visit = self._latest[record.request_id]
        visit.retry_after = record.retry_after
        sent = self._sent_time(visit, record)
        visit.answer_time = self._at_client(sent)
        self._api_server(visit).forget(record.request_id)
        self._end(visit, record)
        if self._on_answer is not None or self.gateway is not None:
            self.env.process(self._go_back(visit, record, sent))

    def _sent_time(self, visit: Visit, record: RequestRecord) -> float:
        """When its last token leaves the stream loop, or word of its end the API server."""
        api, arrival = self._api_server(visit), self.env.now + self.times.engine_link_time
        if record.reason not in ANSWERED or record.request_id in api.hung_up:
            return arrival
        if self._answers_whole:
            return api.stream.send_whole(visit.number, record.num_output_tokens, arrival)
        return api.stream.sent_at(visit.number)

    def _at_client(self, sent: float) -> float:
        return sent + self.times.server_link_time + self.times.client_link_time

    def _go_back(self, visit: Visit, record: RequestRecord, sent: float) -> Process:
        yield Moment(self.env, sent + self.times.server_link_time)
        self._free_slot(visit)
        yield from self._spend(self.times.client_link_time)
        if self._on_answer is not None:
            self._on_answer(record)

    def _end(self, visit: Visit, record: RequestRecord) -> None:
        visit.record = record
        self._on_record(visit.replica or 0, record)

    # -- afterwards -----------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> Iterable[str]:
        return (visit.request.request_id for visit in self.visits if visit.record is None)

    def deliveries(self) -> Deliveries:
        """When each token came to its client's end of the links; answers are numbered as `visits`."""
        parts = [api.stream.deliveries() for apis in self.servers for api in apis]
        return merged(parts, (self.times.server_link_time, self.times.client_link_time))
