"""Steps that were seen, by rows and columns: what each computed, how long it took, and of which run it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.forced import ObservedSteps
from sim.cost import StepWork

Floats = NDArray[np.float64]

# The last is what taking a request in adds to the steps that run meanwhile. A request comes as often as a prompt is
# completed, so both are one price a prompt to the simulator, which charges it when the prompt is.
PRICES = ("per_step", "per_token", "per_decode", "per_completion", "per_kv_token", "per_pair", "per_arrival")
NUM_BLOCKS = 20  # of each run: neighbours share the machine's mood
MIN_STEPS = 100


@dataclass(frozen=True, slots=True)
class Table:
    """Busy intervals of all runs, by rows. `runs` numbers the run of each, `blocks` the neighbours it is drawn with."""

    works: tuple[tuple[StepWork, ...], ...]
    durations: Floats
    arrivals: Floats
    runs: NDArray[np.int64]
    blocks: NDArray[np.int64]

    @classmethod
    def of(cls, runs: Sequence[Sequence[ObservedSteps]]) -> Table:
        """Raises ValueError where there are too few steps to fit anything."""
        kept = [[step for step in steps if step.is_busy] for steps in runs]
        if (num := sum(map(len, kept))) < MIN_STEPS:
            raise ValueError(f"{num} steps are too few to fit a step's price: at least {MIN_STEPS}; give longer runs")
        rows = [(index, step) for index, steps in enumerate(kept) for step in steps]
        blocks = [np.arange(len(steps)) * NUM_BLOCKS // max(1, len(steps)) for steps in kept]
        return cls(
            tuple(step.works for _, step in rows),
            np.array([step.duration for _, step in rows]),
            np.array([float(step.num_arrivals) for _, step in rows]),
            np.array([index for index, _ in rows]),
            np.concatenate(blocks),
        )

    def features(self, free_tokens: float) -> Floats:
        """A column for each of PRICES; an interval of several steps has their sum."""
        counts = np.array([work for works in self.works for work in works], dtype=np.float64)
        sizes = [len(works) for works in self.works]
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        tokens, sampled, decodes, context, pairs = (counts[:, _PLACES[name]] for name in _COUNTS)
        columns = [
            np.ones(len(counts)),
            np.maximum(0.0, tokens - free_tokens),
            decodes,
            np.maximum(0.0, sampled - decodes),
            context,
            pairs,
        ]
        return np.column_stack([np.add.reduceat(np.column_stack(columns), begins, axis=0), self.arrivals])


_COUNTS = ("num_tokens", "num_sampled", "num_decodes", "decode_context", "prefill_pairs")
_PLACES = {name: StepWork._fields.index(name) for name in _COUNTS}


def hull_of(works: Sequence[StepWork]) -> dict[str, tuple[float, float]]:
    table = np.array(works, dtype=np.float64)
    counts = ("num_tokens", "num_decodes", "decode_context", "prefill_pairs")
    columns = {name: table[:, StepWork._fields.index(name)] for name in counts}
    return {name: (float(column.min()), float(column.max())) for name, column in columns.items()}
