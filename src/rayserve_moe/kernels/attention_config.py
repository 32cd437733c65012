"""What is fixed about the attention of all layers when a step is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.parallel.sharding import ParallelPlan


@dataclass(frozen=True)
class AttentionConfig:
    """Heads of `head_dim` elements, lying over devices by `plan` (None: all on one); `eps` is that of their norms.

    `interleaved_rotation`: see `layers.rotate`. `norms_after_rotation`: queries and keys are normed after they are
    rotated. `clip` bounds queries, keys and values ahead of the rotation. `score_scale` None stands for
    head_dim ** -0.5. `windows` gives the positions that each layer sees, its own among them, 0 for all (empty: all).
    """

    head_dim: int
    eps: float
    plan: ParallelPlan | None = None
    interleaved_rotation: bool = False
    norms_after_rotation: bool = False
    clip: float | None = None
    score_scale: float | None = None
    windows: tuple[int, ...] = ()
