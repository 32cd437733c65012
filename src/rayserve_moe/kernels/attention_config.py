"""Constants of attention in a compiled step."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.parallel.sharding import ParallelPlan


@dataclass(frozen=True)
class PoolFormat:
    """The part of the pool's format that settings fix, on which the choice of attention depends."""

    page_size: int = 16
    """Tokens of a page."""
    is_8_bit: bool = False
    """True if keys and values are stored in 8 bits."""


@dataclass(frozen=True)
class AttentionConfig:
    """Constants of grouped-query attention, the same in all layers but for windows."""

    head_dim: int
    """Elements of a head."""
    eps: float
    """Epsilon of the norms of heads."""
    plan: ParallelPlan | None = None
    """Distribution of heads over devices; None: all heads on this device."""
    interleaved_rotation: bool = False
    """See `layers.rotate`."""
    norms_after_rotation: bool = False
    """True if queries and keys are normed after their rotation."""
    clip: float | None = None
    """Bound of queries, keys and values ahead of the rotation."""
    score_scale: float | None = None
    """Factor of scores; None: head_dim ** -0.5."""
    windows: tuple[int, ...] = ()
    """Positions that each layer sees, its own included; 0: all. Empty: all in every layer."""
    output_gate: str = "none"
    """`none`, or the function of the gates that multiply outputs: `sigmoid` or `softplus`."""
    norms_values: bool = False
    """True if values are normed without a scale, ahead of their factor."""
    value_dim: int = 0
    """Elements of a value; 0: as many as of a head."""
    value_scale: float = 1.0
    """Factor of values, ahead of the pool."""
    block_size: int = 0
    """Positions of a block that an index chooses; 0 without an index."""

    @property
    def value_width(self) -> int:
        """Return the number of elements of a value."""
        return self.value_dim or self.head_dim
