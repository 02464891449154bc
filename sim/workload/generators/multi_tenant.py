"""`multi-tenant`: 73 clients, few of which bring most of the load, each with lengths and bursts of its own.

Imitates ServeGen's DeepSeek-R1 workload (Alibaba Model Studio, one day; Apache-2.0): its clients' shares of the rate,
percentiles of prompts and answers over all of them, and how much of the spread of lengths lies between clients. Clients
come in runs, long enough for the trace's CV of a client's gaps. Classes are not in the trace: clients whose prompts are
the longest are `batch`, for 30 % of the rate, the others `interactive`. Nothing is shared, as no content is known.
Distances over 50,000 requests, ten seeds: the top ten clients carry 67.7 % (68 there; 63 to 93 in ServeGen's others);
prompts within 16 % at p10 to p99 and 8 % in the mean, answers within 13 % and 5 %; CV of a client's gaps 2.3 (2.28).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from policies.prompt import LengthPrompt
from policies.types import Context
from sim.workload.quantiles import Percentiles
from sim.workload.recipe import Draw
from sim.workload.streams import stream, weighted_choice

_PROMPTS = Percentiles(
    {0: 4, 1: 9, 2: 10, 5: 13, 10: 17, 15: 25, 20: 36, 25: 48, 30: 61, 40: 97, 45: 130, 50: 180, 55: 260, 60: 341,
     65: 412, 70: 541, 75: 900, 80: 1182, 85: 1452, 90: 3473, 95: 9163, 98: 19620, 99: 26836, 99.9: 34219, 100: 57284},
    log=True,
)  # fmt: skip
_OUTPUTS = Percentiles(
    {0: 9, 1: 141, 2: 171, 5: 227, 10: 294, 20: 409, 30: 527, 40: 720, 45: 859, 50: 1014, 60: 1357, 70: 1931, 75: 2563,
     80: 3275, 85: 4141, 90: 5423, 95: 7858, 98: 11882, 99: 15063, 99.9: 22343, 100: 32768},
    log=True,
)  # fmt: skip
_NUM_CLIENTS = 73
# Share of the rate, in percent, that the biggest clients carry together.
_RANKS = (0, 1, 2, 3, 5, 10, 20, 30, 50, 73)
_CARRIED = (0, 28.6, 36.4, 43.1, 52.5, 67.7, 85.5, 93.4, 99.1, 100)


@dataclass(frozen=True, slots=True)
class MultiTenant:
    """`between`: how much of the variance of lengths (their normal scores) lies between clients, not within them.

    `stays`: how probably the next request is the same client's, apart from its share. `batch_share`: of the rate.
    """

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 16.0
    between: float = 0.66
    stays: float = 0.7
    batch_share: float = 0.3

    def draw(self, num_requests: int, seed: int) -> Draw:
        shares = client_shares()
        clients = self._clients(shares, num_requests, seed)
        prompt_scores, output_scores = _scores(shares, seed, "prompt order"), _scores(shares, seed, "output order")
        outputs = self._lengths(_OUTPUTS, output_scores[clients], seed, "outputs")
        prompts = self._lengths(_PROMPTS, prompt_scores[clients], seed, "prompts")
        class_names = self._class_names(shares, prompt_scores)
        contexts = [Context(tenant=f"tenant-{client}") for client in range(len(shares))]
        return Draw(
            prompts=[LengthPrompt(length) for length in prompts],
            outputs=outputs,
            contexts=[contexts[client] for client in clients.tolist()],
            class_names=[class_names[client] for client in clients.tolist()],
        )

    def _clients(self, shares: NDArray[np.float64], num: int, seed: int) -> NDArray[np.int64]:
        """Whose each request is: the one's before, or anyone's by share."""
        anyone = np.array(weighted_choice(stream(seed, "clients"), num, shares.tolist()))
        stays = stream(seed, "runs").random(num) < self.stays
        stays[:1] = False
        return anyone[np.maximum.accumulate(np.where(stays, 0, np.arange(num)))]

    def _lengths(self, lengths: Percentiles, scores: NDArray[np.float64], seed: int, name: str) -> list[int]:
        own = stream(seed, name).standard_normal(len(scores))
        scores = math.sqrt(self.between) * scores + math.sqrt(1 - self.between) * own
        levels = np.array([math.erfc(-score / math.sqrt(2)) / 2 for score in scores.tolist()])
        return np.rint(lengths.at(levels)).astype(int).tolist()  # type: ignore[no-any-return]

    def _class_names(self, shares: NDArray[np.float64], scores: NDArray[np.float64]) -> list[str]:
        """By client: from the longest prompts down, batch where it still fits."""
        names, left = ["interactive"] * len(shares), self.batch_share
        for client in np.argsort(-scores).tolist():
            if shares[client] <= left:
                names[client] = "batch"
                left -= shares[client]
        return names


def client_shares() -> NDArray[np.float64]:
    """Of the rate, the biggest first."""
    carried = np.interp(np.arange(_NUM_CLIENTS + 1), _RANKS, _CARRIED)
    return np.diff(carried) / 100


def _scores(shares: NDArray[np.float64], seed: int, name: str) -> NDArray[np.float64]:
    """Each client's place between short and long, in an order of its own: normal in the mean over all requests."""
    order = stream(seed, name).permutation(len(shares))
    middles = np.empty(len(shares))
    middles[order] = np.cumsum(shares[order]) - shares[order] / 2
    scores = np.array([NormalDist().inv_cdf(middle) for middle in middles.tolist()])
    scores -= shares @ scores
    return scores / math.sqrt(shares @ scores**2)
