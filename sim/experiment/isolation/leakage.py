"""What times tell: an attacker's advantage with a bound on it, and how many probes make him certain.

He compares a time with a limit of his choice and says yes or no. The most that this gains over guessing, TPR - FPR at
the best limit, is the one-sided Kolmogorov-Smirnov statistic D. A small D found is no proof of a small one: what it may
be all the same follows from the number of trials alone (Dvoretzky, Kiefer, Wolfowitz; Massart's constant, 1990).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, rankdata

from sim.experiment.statistics import Floats, Interval

LEVEL = 0.99  # of bounds on D, and how certain an attacker wants to be
NUM_PERMUTATIONS = 400


@dataclass(frozen=True, slots=True)
class Leak:
    """What `num_yes` times under one truth, and `num_no` under the other, tell.

    `least` and `most` bound the true advantage, each with 99 %. `permuted`: the AUC of the same times with labels
    dealt out at random, mean and the middle 95 %. `probes`: independent ones until a sequential test is 99 % certain,
    on average; None where nothing was found. No attacker who compares with a limit needs fewer than `fewest_probes`.
    """

    num_yes: int
    num_no: int
    advantage: float
    least: float
    most: float
    p_value: float  # of no advantage at all
    auc: Interval
    permuted: Interval
    probes: float | None
    fewest_probes: float


def leak(yes: Sequence[float], no: Sequence[float], yes_is_slower: bool, seed: int = 0) -> Leak:
    """Raises ValueError for fewer than 2 times of a kind, and for probes without a time."""
    high, low = _scores(yes, yes_is_slower), _scores(no, yes_is_slower)
    num_yes, num_no = len(high), len(low)
    tpr, fpr = best_limit(high, low)
    gain, spare = tpr - fpr, slack(num_yes, num_no)
    p_value = math.exp(-2.0 * gain * gain * num_yes * num_no / (num_yes + num_no))
    smooth = (tpr * num_yes + 0.5) / (num_yes + 1), (fpr * num_no + 0.5) / (num_no + 1)
    most = min(1.0, gain + spare)
    return Leak(
        num_yes=num_yes,
        num_no=num_no,
        advantage=gain,
        least=max(0.0, gain - spare),
        most=most,
        p_value=p_value,
        auc=auc(high, low),
        permuted=permuted_auc(high, low, seed),
        probes=probes_to_certainty(*smooth) if p_value < 1.0 - LEVEL else None,
        fewest_probes=fewest_probes(most),
    )


def _scores(times: Sequence[float], yes_is_slower: bool) -> Floats:
    """The higher, the more it looks like a yes."""
    found = np.asarray(times, dtype=np.float64)
    if len(found) < 2:
        raise ValueError(f"{len(found)} trials of a kind tell nothing: 2 or more, better 250")
    if missing := int(np.isnan(found).sum()):
        raise ValueError(
            f"{missing} of {len(found)} probes were never answered: lower the load, or make prompts shorter"
        )
    return found if yes_is_slower else -found


def best_limit(yes: Floats, no: Floats) -> tuple[float, float]:
    """TPR and FPR of saying yes above the limit that sets them furthest apart."""
    limits = np.unique(np.concatenate([yes, no]))
    tpr, fpr = (1.0 - np.searchsorted(np.sort(each), limits, "right") / len(each) for each in (yes, no))
    best = int(np.argmax(tpr - fpr))
    return (float(tpr[best]), float(fpr[best])) if tpr[best] > fpr[best] else (0.0, 0.0)


def slack(num_yes: int, num_no: int, level: float = LEVEL) -> float:
    """How far D may be from what was found: both empirical distributions may be off, each to one side."""
    return sum(math.sqrt(math.log(2.0 / (1.0 - level)) / (2.0 * num)) for num in (num_yes, num_no))


def trials_needed(bound: float, level: float = LEVEL) -> int:
    """Of each kind, so that finding nothing at all claims an advantage below `bound`."""
    if not 0.0 < bound < 1.0:
        raise ValueError(f"a bound on an advantage ({bound}) must lie between 0 and 1")
    return math.ceil(2.0 * math.log(2.0 / (1.0 - level)) / (bound * bound))


def auc(yes: Floats, no: Floats, level: float = 0.95) -> Interval:
    """How often a yes looks more like one than a no does, ties half (DeLong and others, 1988).

    Where all pairs agree, their spread says nothing: then the distribution-free bound of Dvoretzky and others.
    """
    num_yes, num_no = len(yes), len(no)
    ranks = rankdata(np.concatenate([yes, no]))
    of_yes = (ranks[:num_yes] - rankdata(yes)) / num_no
    of_no = 1.0 - (ranks[num_yes:] - rankdata(no)) / num_yes
    mean = float(of_yes.mean())
    error = math.sqrt(float(of_yes.var(ddof=1)) / num_yes + float(of_no.var(ddof=1)) / num_no)
    reach = float(norm.ppf(0.5 + level / 2)) * error or slack(num_yes, num_no, level)
    return Interval(mean, max(0.0, mean - reach), min(1.0, mean + reach), num_yes + num_no, level)


def permuted_auc(yes: Floats, no: Floats, seed: int = 0) -> Interval:
    """With labels dealt out at random: a protocol that finds something here finds it anywhere."""
    random, num_yes, num_no = np.random.default_rng(seed), len(yes), len(no)
    ranks = np.tile(rankdata(np.concatenate([yes, no])), (NUM_PERMUTATIONS, 1))
    sums = random.permuted(ranks, axis=1)[:, :num_yes].sum(axis=1)
    found = (sums - num_yes * (num_yes + 1) / 2) / (num_yes * num_no)
    low, high = np.quantile(found, (0.025, 0.975))
    return Interval(float(found.mean()), float(low), float(high), NUM_PERMUTATIONS)


def probes_to_certainty(tpr: float, fpr: float, certainty: float = LEVEL) -> float:
    """Mean number of yes-or-no probes of a sequential test (Wald, 1945), under the truth that takes longer."""
    odds = math.log(certainty / (1.0 - certainty))
    return max(1.0, (2.0 * certainty - 1.0) * odds / min(_informs(tpr, fpr), _informs(fpr, tpr)))


def _informs(p: float, q: float) -> float:
    """Log likelihood ratio that a probe brings on average, where p is true and q is not."""
    return p * math.log(p / q) + (1.0 - p) * math.log((1.0 - p) / (1.0 - q))


def fewest_probes(advantage: float, certainty: float = LEVEL) -> float:
    """Probes that any test of so weak a hint needs: n of them tell no more than 1 - (1 - D)^n."""
    if advantage >= 1.0:
        return 1.0
    return max(1.0, math.log(2.0 * (1.0 - certainty)) / math.log1p(-advantage)) if advantage > 0.0 else math.inf
