"""Arrivals in spells, as Azure's code service saw them: packs of requests within milliseconds, then minutes of none.

Imitates the gaps of Azure's LLM inference trace 2023 "code" (CC-BY-4.0; Splitwise, ISCA 2024): CV 13.2, index of
dispersion 13 / 71 / 161 over 1 / 10 / 60 s. A spell is what lies between two pauses above 1 s; its size, its pauses and
its gaps follow the trace's percentiles, and spells differ in pace. Independent gaps alone would keep the CV, but lose a
quarter of the dispersion. In the mean of many seeds CV and dispersions are within 10 %; a single hour of 8,819 requests
has a CV of 10 to 14, and dispersions of 0.7 to 1.4 times the trace's, as its few long pauses fall.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.workload.quantiles import Percentiles
from sim.workload.streams import stream

RATE = 2.57  # of the trace, requests a second

_SIZES = Percentiles({0: 1, 5: 2, 25: 12, 50: 27, 75: 78, 90: 150, 95: 253, 100: 575}, log=True)  # requests
_PAUSES = Percentiles({0: 1, 5: 1.1, 25: 1.7, 50: 3.1, 75: 18, 90: 49, 95: 88, 98: 149, 100: 217}, log=True)  # s
_GAPS = Percentiles(  # s
    {0: 6e-6, 5: 9e-5, 10: 2e-4, 25: 0.002, 35: 0.005, 45: 0.035, 50: 0.06, 60: 0.094, 75: 0.103, 80: 0.138, 90: 0.223,
     95: 0.337, 99: 0.645, 100: 1}, log=True
)  # fmt: skip
_PACE_SIGMA = 0.62  # of the logarithm of a spell's pace
_OWN_RATE = 2.66  # of these in the long run, requests a second


@dataclass(frozen=True, slots=True)
class CodeBursts:
    """At another rate than the trace's, pauses and gaps are all stretched alike."""

    rate: float = RATE

    def __str__(self) -> str:
        return "in spells as in Azure's code trace (CV 13)"

    def times(self, num: int, seed: int) -> list[float]:
        sizes = np.rint(_SIZES.draw(stream(seed, "spell sizes"), num)).astype(int)  # of one a request: enough
        ends = np.cumsum(sizes)
        spell = np.searchsorted(ends, np.arange(num), side="right")
        paces = np.exp(_PACE_SIGMA * stream(seed, "spell paces").standard_normal(num) - _PACE_SIGMA**2 / 2)
        gaps = _GAPS.draw(stream(seed, "arrivals"), num) * paces[spell]
        pauses = _PAUSES.draw(stream(seed, "pauses"), num)
        begins = np.concatenate([[0], ends])[: spell.max(initial=-1) + 1]
        gaps[begins] = pauses[: len(begins)]
        times: list[float] = (np.cumsum(gaps) * (_OWN_RATE / self.rate)).tolist()
        return times
