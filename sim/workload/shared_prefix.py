"""Shared prefixes: tenants that use the same applications, each application behind one long system prompt.

Global reuse finds a prefix once per application; a tenant kept to itself computes it again. Content ids stand for 16
tokens: the prefixes' own come first, then those no other request has.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.prompt import ContentPrompt
from policies.types import Context
from sim.workload.recipe import Draw
from sim.workload.streams import lognormal_lengths, stream, weighted_choice

CONTENT_SIZE = 16
_IDS_PER_REQUEST = 2**20  # 16 million tokens: no two requests' own ids can meet


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Lengths in tokens. Tenants and applications are drawn independently, with Zipf weights for tenants."""

    default_rate: float = 4.0
    num_tenants: int = 8
    tenant_skew: float = 1.0
    num_applications: int = 4
    users_per_tenant: int = 4
    prefix_tokens: int = 1024
    own_median: int = 256
    own_sigma: float = 0.8
    own_most: int = 2048
    output_median: int = 128
    output_sigma: float = 0.7
    output_most: int = 512

    def __post_init__(self) -> None:
        if self.prefix_tokens % CONTENT_SIZE:
            raise ValueError(f"prefix_tokens ({self.prefix_tokens}) must be a multiple of {CONTENT_SIZE}")

    def draw(self, num_requests: int, seed: int) -> Draw:
        applications = self._uniform(seed, "applications", num_requests, self.num_applications)
        own = lognormal_lengths(stream(seed, "prompts"), num_requests, self.own_median, self.own_sigma, self.own_most)
        return Draw(
            prompts=[self.prompt(index, *each) for index, each in enumerate(zip(applications, own, strict=True))],
            outputs=lognormal_lengths(
                stream(seed, "outputs"), num_requests, self.output_median, self.output_sigma, self.output_most
            ),
            contexts=self._contexts(seed, applications),
        )

    def prompt(self, index: int, application: int, num_own_tokens: int) -> ContentPrompt:
        per_prefix = self.prefix_tokens // CONTENT_SIZE
        first = (index + 1) * _IDS_PER_REQUEST
        shared = range(application * per_prefix, (application + 1) * per_prefix)
        own = range(first, first - (-num_own_tokens // CONTENT_SIZE))
        return ContentPrompt(self.prefix_tokens + num_own_tokens, (*shared, *own), CONTENT_SIZE)

    def _contexts(self, seed: int, applications: list[int]) -> list[Context]:
        weights = [(rank + 1) ** -self.tenant_skew for rank in range(self.num_tenants)]
        tenants = weighted_choice(stream(seed, "tenants"), len(applications), weights)
        users = self._uniform(seed, "users", len(applications), self.users_per_tenant)
        callers = zip(tenants, users, applications, strict=True)
        return [
            Context(f"tenant-{tenant}", f"tenant-{tenant}-user-{user}", f"app-{application}", f"session-{index}")
            for index, (tenant, user, application) in enumerate(callers)
        ]

    @staticmethod
    def _uniform(seed: int, name: str, num: int, choices: int) -> list[int]:
        return weighted_choice(stream(seed, name), num, [1.0] * choices)
