"""The stream loop: when each token leaves the server, as a fold over the ends of steps.

One loop detokenises and sends, first in, first out: step by step, and within a step in the order of the plan. A step's
tokens come together, so nothing has to happen for each of them:

    start        = max(when they come, when the loop is done with the step before)
    token j of n = start + (j + 1) * time_per_token + (first tokens of answers, up to j) * time_per_request

Neither asks how many steps a plan repeats: the bits are the same with jumps on or off.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Deliveries:
    """When tokens came to their clients, answer by answer and in order of time.

    An entry of the first four is a run: `nums` tokens of an answer, one in each of consecutive steps from `steps` on,
    `lags` after the loop's start on that step. `links` are then added one after the other.
    """

    answers: Ints
    steps: Ints
    nums: Ints
    lags: Floats
    starts: Floats  # by step
    links: tuple[float, ...] = ()

    @property
    def firsts(self) -> Floats:
        """When the first token of each run came."""
        return self._passed(self.starts[self.steps] + self.lags)

    @property
    def lasts(self) -> Floats:
        return self._passed(self.starts[self.steps + self.nums - 1] + self.lags)

    def times(self, runs: slice = slice(None)) -> Floats:
        """Of every token of these runs."""
        nums = self.nums[runs]
        steps = np.repeat(self.steps[runs] - _begins(nums), nums) + np.arange(nums.sum())
        return self._passed(self.starts[steps] + np.repeat(self.lags[runs], nums))

    def gaps(self) -> Floats:
        """Between consecutive tokens of an answer, all answers pooled."""
        ends = np.flatnonzero(np.diff(self.answers))  # the last run of each answer but the last
        return np.delete(np.diff(self.times()), np.cumsum(self.nums)[ends] - 1)

    def only(self, chosen: NDArray[np.bool_]) -> Deliveries:
        """Of the answers with chosen[answer]."""
        kept = chosen[self.answers]
        columns = (self.answers[kept], self.steps[kept], self.nums[kept], self.lags[kept])
        return Deliveries(*columns, self.starts, self.links)

    def _passed(self, times: Floats) -> Floats:
        for link in self.links:
            times = times + link
        return times


def merged(parts: Sequence[Deliveries], links: tuple[float, ...] = ()) -> Deliveries:
    """Answer by answer: of loops that have no answer in common, and the links their tokens take to the clients."""
    shifts = _begins(_ints([len(part.starts) for part in parts]))
    answers = np.concatenate([part.answers for part in parts])
    order = np.argsort(answers, kind="stable")
    return Deliveries(
        answers[order],
        np.concatenate([part.steps + shift for part, shift in zip(parts, shifts, strict=True)])[order],
        np.concatenate([part.nums for part in parts])[order],
        np.concatenate([part.lags for part in parts])[order],
        np.concatenate([part.starts for part in parts]),
        links,
    )


class StreamLoop:
    """Answers have numbers, given by the caller. `free_at`: when it is done with all it was given."""

    def __init__(self, time_per_request: float, time_per_token: float) -> None:
        self.free_at = 0.0
        self._time_per_request = time_per_request
        self._time_per_token = time_per_token
        self._unsent: set[int] = set()  # answers whose first token has not come
        self._batch: list[int] = []  # answers that got a token in the last step
        self._num_firsts = 0  # of these tokens
        self._answers = array("q")  # by batch and place in it
        self._firsts = array("q")  # places in `_answers` of first tokens
        self._widths = array("q")  # tokens a step, by batch
        self._repeats = array("q")  # steps, by batch
        self._starts = array("d")  # by step
        self._whole: list[tuple[int, float]] = []

    def open(self, answer: int) -> None:
        """Tokens of it may come."""
        self._unsent.add(answer)

    def send(self, answers: list[int], arrivals: Sequence[float]) -> None:
        """A token of each answer comes at each arrival."""
        if not answers or not arrivals:
            return
        if answers != self._batch or self._num_firsts:
            self._begin(answers)
        assert not self._num_firsts or len(arrivals) == 1, "an answer cannot begin in each of several steps"
        self._repeats[-1] += len(arrivals)
        work, free = self._lag(len(answers) - 1, self._num_firsts), self.free_at
        for arrival in arrivals:
            start = arrival if arrival > free else free
            self._starts.append(start)
            free = start + work
        self.free_at = free

    def _begin(self, answers: list[int]) -> None:
        """A batch: consecutive steps that give tokens to the same answers, and take equally long."""
        firsts = []
        if not self._unsent.isdisjoint(answers):
            begin = len(self._answers)
            firsts = [begin + place for place, answer in enumerate(answers) if answer in self._unsent]
            self._unsent.difference_update(answers)
        self._batch, self._num_firsts = answers, len(firsts)
        self._firsts.fromlist(firsts)
        self._answers.fromlist(answers)
        self._widths.append(len(answers))
        self._repeats.append(0)

    def _lag(self, place: int, num_firsts: int) -> float:
        return (place + 1) * self._time_per_token + num_firsts * self._time_per_request

    def sent_at(self, answer: int) -> float:
        """When the last token that came of this answer leaves; it must have come with the last step."""
        place = self._batch.index(answer)
        end = len(self._answers) - len(self._batch) + place
        firsts = self._firsts[-self._num_firsts :] if self._num_firsts else ()
        return self._starts[-1] + self._lag(place, sum(each <= end for each in firsts))

    def send_whole(self, answer: int, num_tokens: int, arrival: float) -> float:
        """An answer comes in one piece and leaves in one; returns when."""
        self.free_at = max(arrival, self.free_at) + self._lag(num_tokens - 1, 1)
        self._whole.append((answer, self.free_at))
        return self.free_at

    # -- afterwards -----------------------------------------------------------------------------------------------

    def deliveries(self) -> Deliveries:
        """Of all tokens so far, in the order of plans; a whole answer counts as one."""
        answers, widths, repeats = map(_ints, (self._answers, self._widths, self._repeats))
        streamed = Deliveries(
            answers,
            np.repeat(_begins(repeats), widths),
            np.repeat(repeats, widths),
            self._lags(widths),
            np.array(self._starts, dtype=np.float64),
        )
        return merged((streamed, self._whole_ones())) if self._whole else streamed

    def _whole_ones(self) -> Deliveries:
        answers, times = _ints([answer for answer, _ in self._whole]), np.array([time for _, time in self._whole])
        num = len(answers)
        return Deliveries(answers, np.arange(num), np.ones(num, dtype=np.int64), np.zeros(num), times)

    def _lags(self, widths: Ints) -> Floats:
        """From the start of a step to the end of each of its tokens, by place in `_answers`."""
        begins = np.repeat(_begins(widths), widths)
        is_first = np.zeros(len(begins), dtype=np.int64)
        is_first[_ints(self._firsts)] = 1
        so_far = np.cumsum(is_first)
        num_firsts = so_far - (so_far - is_first)[begins]
        places = np.arange(len(begins)) - begins
        return (places + 1) * self._time_per_token + num_firsts * self._time_per_request


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _begins(sizes: Ints) -> Ints:
    """Where each of consecutive runs begins."""
    begins: Ints = np.cumsum(sizes) - sizes
    return begins
