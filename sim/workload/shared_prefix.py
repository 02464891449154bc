"""Shared prefixes: tenants that use the same applications, each application behind one long system prompt.

Global reuse finds a prefix once per application; a tenant kept to itself computes it again. The first content ids of a
prompt are its application's, the others no other request has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.prompt import ContentPrompt
from policies.types import Context
from sim.workload.generators.prompts import prompt_after
from sim.workload.recipe import Draw
from sim.workload.streams import lognormal_lengths, stream, weighted_choice, zipf_weights


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Lengths in tokens. Tenants and applications are drawn independently, with Zipf weights for both."""

    default_arrivals: ClassVar[str] = "poisson"
    default_rate: float = 4.0
    num_tenants: int = 8
    tenant_skew: float = 1.0
    num_applications: int = 4
    application_skew: float = 0.0
    users_per_tenant: int = 4
    prefix_tokens: int = 1024
    own_median: int = 256
    own_sigma: float = 0.8
    own_most: int = 2048
    output_median: int = 128
    output_sigma: float = 0.7
    output_most: int = 512
    content_size: int = 16  # tokens a content id

    def __post_init__(self) -> None:
        if self.prefix_tokens % self.content_size:
            raise ValueError(f"prefix_tokens ({self.prefix_tokens}) must be a multiple of {self.content_size}")

    def draw(self, num_requests: int, seed: int) -> Draw:
        applications = self._ranks(seed, "applications", num_requests, self.num_applications, self.application_skew)
        own = lognormal_lengths(stream(seed, "prompts"), num_requests, self.own_median, self.own_sigma, self.own_most)
        return Draw(
            prompts=self._prompts(applications, own),
            outputs=lognormal_lengths(
                stream(seed, "outputs"), num_requests, self.output_median, self.output_sigma, self.output_most
            ),
            contexts=self._contexts(seed, applications),
        )

    def _prompts(self, applications: list[int], own: list[int]) -> list[ContentPrompt]:
        num, size = self.prefix_tokens // self.content_size, self.content_size
        prefixes = [tuple(range(first * num, (first + 1) * num)) for first in range(self.num_applications)]
        return [
            prompt_after(prefixes[application], self.prefix_tokens, self.prefix_tokens + num_own, index, size)
            for index, (application, num_own) in enumerate(zip(applications, own, strict=True))
        ]

    def _contexts(self, seed: int, applications: list[int]) -> list[Context]:
        num = len(applications)
        tenants = self._ranks(seed, "tenants", num, self.num_tenants, self.tenant_skew)
        users = self._ranks(seed, "users", num, self.users_per_tenant)
        callers = zip(tenants, users, applications, strict=True)
        return [
            Context(f"tenant-{tenant}", f"tenant-{tenant}-user-{user}", f"app-{application}", f"session-{index}")
            for index, (tenant, user, application) in enumerate(callers)
        ]

    @staticmethod
    def _ranks(seed: int, name: str, num: int, choices: int, skew: float = 0.0) -> list[int]:
        return weighted_choice(stream(seed, name), num, zipf_weights(choices, skew))
