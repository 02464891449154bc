"""Built-in workloads: Poisson arrivals of requests drawn from a recipe, or of lengths given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from policies.prompt import LengthPrompt
from sim.workload.recipe import Draw, Recipe
from sim.workload.shared_prefix import SharedPrefix
from sim.workload.streams import lognormal_lengths, poisson_arrivals, stream
from sim.workload.workload import Workload, output_limit, work_items

DEFAULT_NUM_REQUESTS = 1000
MAX_NUM_REQUESTS = 10**7  # about 10 GB of requests


@dataclass(frozen=True, slots=True)
class Chat:
    """Short questions, shorter answers, nothing shared. Lengths are lognormal, in tokens."""

    default_rate: float = 4.0
    prompt_median: int = 512
    prompt_sigma: float = 0.9
    prompt_most: int = 4096
    output_median: int = 192
    output_sigma: float = 0.7
    output_most: int = 1024

    def draw(self, num_requests: int, seed: int) -> Draw:
        prompts = lognormal_lengths(
            stream(seed, "prompts"), num_requests, self.prompt_median, self.prompt_sigma, self.prompt_most
        )
        outputs = lognormal_lengths(
            stream(seed, "outputs"), num_requests, self.output_median, self.output_sigma, self.output_most
        )
        return Draw([LengthPrompt(length) for length in prompts], outputs)


@dataclass(frozen=True, slots=True)
class Fixed:
    """All the same: what is left to vary is the server."""

    default_rate: float = 4.0
    num_prompt_tokens: int = 512
    num_output_tokens: int = 128

    def draw(self, num_requests: int, seed: int) -> Draw:
        return Draw([LengthPrompt(self.num_prompt_tokens)] * num_requests, [self.num_output_tokens] * num_requests)


RECIPES: dict[str, Callable[[], Recipe]] = {"chat": Chat, "fixed": Fixed, "shared-prefix": SharedPrefix}


def recipe_named(name: str) -> Recipe:
    if name not in RECIPES:
        close = get_close_matches(name, RECIPES, n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(sorted(RECIPES))}{hint}")
    return RECIPES[name]()


def generate(
    name: str,
    *,
    num_requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    recipe: Recipe | None = None,
) -> Workload:
    """A named workload, or a recipe of your own under a name; `rate` is that of its Poisson arrivals."""
    recipe = recipe_named(name) if recipe is None else recipe
    num_requests = DEFAULT_NUM_REQUESTS if num_requests is None else num_requests
    if not 1 <= num_requests <= MAX_NUM_REQUESTS:
        raise ValueError(f"num_requests ({num_requests}) must be from 1 to {MAX_NUM_REQUESTS}")
    rate = recipe.default_rate if rate is None else rate
    arrivals = poisson_arrivals(rate, num_requests, seed)
    draw = recipe.draw(num_requests, seed)
    limit, finding = output_limit(draw.outputs, max_tokens)
    return Workload(
        name=name,
        items=work_items(arrivals, draw.prompts, draw.outputs, limit, draw.contexts),
        findings=(f"arrivals are Poisson at {rate:g} requests a second", finding),
        source=f"{recipe!r}, num_requests={num_requests}, rate={rate!r}, seed={seed}",
    )


def from_lengths(
    arrivals: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    *,
    max_tokens: int | None = None,
    name: str = "lengths",
    source: str = "lengths given",
    findings: tuple[str, ...] = (),
) -> Workload:
    """A workload from times in seconds and lengths in tokens, one entry a request; prompts share nothing."""
    if not len(arrivals) == len(prompts) == len(outputs):
        raise ValueError(
            f"arrivals ({len(arrivals)}), prompts ({len(prompts)}) and outputs ({len(outputs)}) must be equally many"
        )
    if min((*prompts, *outputs), default=1) < 1:
        raise ValueError(f"lengths must be at least 1 token, not {min(*prompts, *outputs)}")
    limit, finding = output_limit(outputs, max_tokens)
    items = work_items(arrivals, [LengthPrompt(length) for length in prompts], outputs, limit)
    return Workload(name, items, (*findings, finding), source)


def poisson(
    prompts: Sequence[int], outputs: Sequence[int], *, rate: float, seed: int = 0, max_tokens: int | None = None
) -> Workload:
    """Poisson arrivals of the lengths given, in their order."""
    arrivals = poisson_arrivals(rate, len(prompts), seed)
    source = f"poisson(rate={rate!r}, seed={seed}) of {len(prompts)} lengths given"
    finding = f"arrivals are Poisson at {rate:g} requests a second"
    return from_lengths(
        arrivals, prompts, outputs, max_tokens=max_tokens, name="poisson", source=source, findings=(finding,)
    )
