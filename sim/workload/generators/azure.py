"""Azure's two LLM services of 2023: `azure-conv`, a chat that drifts, and `azure-code`, a completion that bursts.

Imitate the Azure LLM inference trace 2023 (CC-BY-4.0; Splitwise, ISCA 2024): 19,366 and 8,819 requests of an hour each.
Lengths follow the traces' percentiles, prompts and answers independent (rank correlation there 0.07 and -0.02); no
content is known, so nothing is shared. Over as many requests, ten seeds: within 10 % at p10 to p99, means within 10 %.
Arrivals of conv are Poisson along an hour that swells and ebbs once: CV 1.05 (trace 1.09), index of dispersion 1.3 /
3.8 / 20 over 1 / 10 / 60 s (1.4 / 4.0 / 21). Arrivals of code come in spells: see bursts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.prompt import LengthPrompt
from sim.workload.bursts import RATE
from sim.workload.quantiles import Percentiles
from sim.workload.recipe import Draw
from sim.workload.streams import stream

_CONVERSATION_PROMPTS = Percentiles(
    {0: 2, 1: 29, 5: 181, 10: 207, 20: 387, 25: 396, 30: 403, 40: 703, 50: 1020, 60: 1071, 65: 1097, 70: 1130, 75: 1189,
     80: 1315, 85: 1876, 90: 2734, 95: 4083, 99: 4142, 99.9: 6179, 100: 14050}
)  # fmt: skip
_CONVERSATION_OUTPUTS = Percentiles(
    {0: 7, 1: 16, 5: 41, 10: 54, 20: 77, 25: 85, 30: 91, 40: 103, 50: 129, 60: 177, 65: 217, 70: 384, 75: 395, 80: 400,
     85: 411, 90: 424, 95: 451, 99: 601, 99.9: 954, 100: 1000}
)  # fmt: skip
_CODE_PROMPTS = Percentiles(
    {0: 3, 1: 17, 5: 75, 10: 147, 20: 386, 25: 578, 30: 770, 40: 1075, 50: 1469, 60: 1909, 65: 2164, 70: 2433, 75: 2744,
     80: 3192, 85: 3920, 90: 5188, 95: 7303, 99: 7436, 100: 7437}
)  # fmt: skip
_CODE_OUTPUTS = Percentiles(
    {0: 6, 5: 6, 10: 7, 20: 8, 30: 9, 40: 11, 50: 13, 60: 16, 70: 20, 75: 24, 80: 29, 85: 39, 90: 55, 95: 90, 99: 251,
     99.9: 825, 100: 1899}, log=True
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AzureConversation:
    """The hour's rate rises to 1.34 times its mean in the middle; the trace's is more ragged."""

    default_arrivals: ClassVar[str] = "day,peak_to_mean=1.34,period=3500"
    default_rate: float = 5.53

    def draw(self, num_requests: int, seed: int) -> Draw:
        return _independent(_CONVERSATION_PROMPTS, _CONVERSATION_OUTPUTS, num_requests, seed)


@dataclass(frozen=True, slots=True)
class AzureCode:
    """One prompt in 25 is cut at 7,437 tokens, as in the trace."""

    default_arrivals: ClassVar[str] = "azure-code"
    default_rate: float = RATE

    def draw(self, num_requests: int, seed: int) -> Draw:
        return _independent(_CODE_PROMPTS, _CODE_OUTPUTS, num_requests, seed)


def _independent(prompts: Percentiles, outputs: Percentiles, num: int, seed: int) -> Draw:
    lengths = prompts.lengths(stream(seed, "prompts"), num)
    return Draw([LengthPrompt(length) for length in lengths], outputs.lengths(stream(seed, "outputs"), num))
