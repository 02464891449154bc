"""Built-in workloads: requests drawn from a recipe, or of lengths given, and when they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from policies.prompt import LengthPrompt
from sim.workload.arrivals import parse_arrivals
from sim.workload.generators.azure import AzureCode, AzureConversation
from sim.workload.generators.cases import Cycle, RepeatedPrefix
from sim.workload.generators.claude_code import ClaudeCode
from sim.workload.generators.conversation import Conversation
from sim.workload.generators.mooncake import MooncakeConversation
from sim.workload.generators.multi_tenant import MultiTenant
from sim.workload.generators.prefixes import document_template, system_instruction, tool_schema
from sim.workload.loops import assemble
from sim.workload.recipe import Draw, Recipe
from sim.workload.shared_prefix import SharedPrefix
from sim.workload.spec import parse
from sim.workload.streams import lognormal_lengths, poisson_arrivals, stream
from sim.workload.workload import Workload, output_limit, work_items

DEFAULT_NUM_REQUESTS = 1000
MAX_NUM_REQUESTS = 10**7  # about 10 GB of requests
MAX_KNOB = 10**6  # of a recipe's lengths and numbers


@dataclass(frozen=True, slots=True)
class Chat:
    """Short questions, shorter answers, nothing shared. Lengths are lognormal, in tokens."""

    default_arrivals: ClassVar[str] = "poisson"
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

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 4.0
    num_prompt_tokens: int = 512
    num_output_tokens: int = 128

    def draw(self, num_requests: int, seed: int) -> Draw:
        return Draw([LengthPrompt(self.num_prompt_tokens)] * num_requests, [self.num_output_tokens] * num_requests)


RECIPES: dict[str, Callable[..., Recipe]] = {
    "azure-code": AzureCode,
    "azure-conv": AzureConversation,
    "chat": Chat,
    "claude-code": ClaudeCode,
    "conversation": Conversation,
    "cycle": Cycle,
    "document-template": document_template,
    "fixed": Fixed,
    "mooncake-conversation": MooncakeConversation,
    "multi-tenant": MultiTenant,
    "repeated-prefix": RepeatedPrefix,
    "shared-prefix": SharedPrefix,
    "system-instruction": system_instruction,
    "tool-schema": tool_schema,
}


def recipe_named(text: str) -> Recipe:
    """`chat`, or with some of its recipe's numbers changed: `chat,prompt_median=64`. Raises ValueError of one line."""
    make = parse("workload", text, RECIPES, num_given=0)
    assert isinstance(make, partial)
    for knob, value in make.keywords.items():
        least = 1 if isinstance(value, int) else 0.0
        if not isinstance(value, str) and not least <= value <= MAX_KNOB:
            raise ValueError(f"{knob} ({value:g}) of workload {text!r} must be from {least:g} to {MAX_KNOB:,}")
    recipe: Recipe = make()
    return recipe


def generate(
    name: str,
    *,
    num_requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    recipe: Recipe | None = None,
    arrivals: str | None = None,
) -> Workload:
    """A named workload, perhaps with knobs (`recipe_named`), or a recipe of your own under a name.

    `arrivals` as `parse_arrivals` reads it, the recipe's own unless given; `rate` is theirs: of requests, or of
    sessions where requests wait for each other.
    """
    recipe = recipe_named(name) if recipe is None else recipe
    num_requests = DEFAULT_NUM_REQUESTS if num_requests is None else num_requests
    if not 1 <= num_requests <= MAX_NUM_REQUESTS:
        raise ValueError(f"num_requests ({num_requests}) must be from 1 to {MAX_NUM_REQUESTS}")
    process = parse_arrivals(arrivals or recipe.default_arrivals, rate, recipe.default_rate)
    draw = recipe.draw(num_requests, seed)
    limit, finding = output_limit(draw.outputs, max_tokens)
    told = "" if arrivals is None else f", arrivals={arrivals!r}"
    rate = getattr(process, "rate", None)
    source = f"{recipe!r}, num_requests={num_requests}, rate={rate!r}, seed={seed}{told}"
    return assemble(name.split(",")[0], draw, process, limit, seed, (finding,), source)


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
