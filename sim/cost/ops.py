"""A profile's operations for one GPU's share of a model: seconds of all layers, by the counts of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

from sim.cost.draws import Draw
from sim.cost.kinds import Decode
from sim.cost.op_model import OpModel, ShapedOp
from sim.cost.profile import Profile
from sim.cost.surface import Line
from sim.models.shape import Matrix, Model

DECODE, PREFILL, MIXED, GEMM = "decode attention", "prefill attention", "mixed attention", "gemm"


@dataclass(frozen=True, slots=True)
class Ops:
    """None where the profile has no such operation for this model. `mixed` stands for both other attentions."""

    profile: Profile
    decode: ShapedOp | None
    prefill: ShapedOp | None
    mixed: ShapedOp | None
    gemms: MeasuredGemms | None

    @classmethod
    def of(cls, profile: Profile, part: Model, draw: Draw | None = None) -> Ops:
        return cls(
            profile,
            _attention(_drawn(attention_model(profile, DECODE, part), draw), part),
            _attention(_drawn(attention_model(profile, PREFILL, part), draw), part),
            _mixed(_drawn(mixed_model(profile, part), draw)),
            MeasuredGemms.of(profile, part, draw),
        )

    @property
    def are_none(self) -> bool:
        return all(op is None for op in (self.decode, self.prefill, self.mixed, self.gemms))

    @property
    def provenance(self) -> Mapping[str, str]:
        """Where the time of each part of a step comes from."""
        measured = {DECODE: self.mixed or self.decode, PREFILL: self.mixed or self.prefill, GEMM: self.gemms}
        parts = {name: self.profile.provenance if op else "datasheet" for name, op in measured.items()}
        return {**parts, "small kernels, all-reduces, experts, host": "datasheet"}


@dataclass(frozen=True, slots=True)
class MeasuredGemms:
    """All GEMMs of the layers, and that of the LM head."""

    layers: Line
    head: Line
    num_launches: int  # of the layers
    last_rows: float  # the most that were measured

    @classmethod
    def of(cls, profile: Profile, part: Model, draw: Draw | None = None) -> MeasuredGemms | None:
        """None where GEMMs of the weights' type or in bf16 were not measured: router and head are never quantised."""
        stored, plain = (_drawn(profile.model(GEMM, dtype=dtype), draw) for dtype in (_stored(part.dtype), "bf16"))
        if stored is None or plain is None:
            return None
        used = [(stored, matrix) for matrix in part.attention_matrices + part.mlp_matrices]
        used += [(plain, matrix) for matrix in router(part)]
        return cls(
            layers=reduce(_sum, (_line(model, matrix) for model, matrix in used)),
            head=_line(plain, Matrix(part.vocab_size, part.hidden_size, 1)),
            num_launches=sum(matrix.num_layers for _, matrix in used),
            last_rows=stored.hull.get("m", (1.0, math.inf))[1],
        )


def router(part: Model) -> tuple[Matrix, ...]:
    return (Matrix(part.experts.num_experts, part.hidden_size, part.num_expert_layers),) if part.experts else ()


def attention_model(profile: Profile, name: str, part: Model) -> OpModel | None:
    """That prices this model's heads; none where they share a latent.

    Decodes read their KV from memory: weights and other layers pass through the cache between two of its uses.
    """
    if part.latent:
        return None
    grouped = part.num_heads > part.num_kv_heads
    found = profile.model(name, head_dim=part.head_dim, kv_dtype=_stored(part.kv_dtype), grouped=grouped)
    if found is None or not isinstance(found.kind, Decode):
        return found
    return replace(found, kind=replace(found.kind, is_cold=True))


def mixed_model(profile: Profile, part: Model) -> OpModel | None:
    """Both attentions in one launch, where they were measured so; with windows or latents they were not."""
    if part.latent or part.num_sliding_layers:
        return None
    heads = {"num_heads": part.num_heads, "num_kv_heads": part.num_kv_heads, "head_dim": part.head_dim}
    return profile.model(MIXED, **heads, kv_dtype=_stored(part.kv_dtype))


def _mixed(model: OpModel | None) -> ShapedOp | None:
    return model.shaped() if model else None


def _attention(model: OpModel | None, part: Model) -> ShapedOp | None:
    return model.shaped(part.num_kv_heads, part.num_heads // part.num_kv_heads) if model else None


def _stored(dtype: str) -> str:
    """fp16 kernels are as fast as bf16's."""
    return "bf16" if dtype == "fp16" else dtype


def _drawn(model: OpModel | None, draw: Draw | None) -> OpModel | None:
    return model.drawn(draw.number, draw.score(model.kind.name)) if model and draw else model


def _line(model: OpModel, matrix: Matrix) -> Line:
    surface = model.shaped(matrix.n, matrix.k).surface
    return Line(surface.axes[0], tuple(matrix.num_layers * time for time in surface.values))


def _sum(a: Line, b: Line) -> Line:
    """At the nodes of both."""
    nodes = tuple(sorted({*a.nodes, *b.nodes}))
    return Line(nodes, tuple(a.at(x) + b.at(x) for x in nodes))
