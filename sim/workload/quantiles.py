"""Distributions told by a few of their percentiles, which is all that the project keeps of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Percentiles:
    """Percent -> value, from 0 to 100; values between knots lie on a line, or with `log` on one through logarithms."""

    knots: Mapping[float, float]
    log: bool = False

    def __post_init__(self) -> None:
        percents, values = list(self.knots), list(self.knots.values())
        assert percents[0] == 0 and percents[-1] == 100, "a distribution is told from 0 to 100 percent"
        assert percents == sorted(percents) and values == sorted(values), "percentiles rise"

    def at(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """The value below which each share of the distribution lies."""
        shares, values = np.array(list(self.knots)) / 100, np.array(list(self.knots.values()))
        if self.log:
            return np.asarray(np.exp(np.interp(uniforms, shares, np.log(values))))
        return np.asarray(np.interp(uniforms, shares, values))

    def draw(self, generator: np.random.Generator, num: int) -> NDArray[np.float64]:
        """One uniform each, so that draw i never depends on how many are asked for."""
        return self.at(generator.random(num))

    def lengths(self, generator: np.random.Generator, num: int) -> list[int]:
        """Whole tokens, at least one."""
        return [max(1, round(value)) for value in self.draw(generator, num).tolist()]
