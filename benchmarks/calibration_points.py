"""Device times that others have published, with the work of each kernel: what the estimate is calibrated with."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.tools.estimate.rates import (
    ATTENTION,
    ATTENTION_BASELINES,
    COLLECTIVE,
    COPY,
    GMM,
    JAX_MATMUL,
    KERNEL,
    PROMPT_ATTENTION,
    RECIPES,
    STRIDED_ATTENTION,
)

MIB = 1 << 20
V6E_MATRIX_OPS = 8192**3 // (16 * 256 * 256)
"""Matrix instructions of 8192^3 on v6e, each 16 rows of 256 x 256."""


@dataclass(frozen=True)
class Point:
    """A published device time and the work of that run."""

    kernel: str
    chip: str
    """Key of `chips.CHIPS`."""
    shape: str
    published_us: float
    source: str
    kind: str
    is_fitted: bool = False
    """True if the constants are fitted to it; the others test them."""
    compiled: str = ""
    """Kernel whose schedule gives the bundles (`calibration_kernels.KERNELS`)."""
    scale: float = 1.0
    """Work of the measured shape over work of the compiled shape."""
    core_us: float = 0.0
    """Core time without a compiled kernel, read by hand from its schedule: only the code that runs."""
    hbm_bytes: float = 0.0
    """Bytes by arithmetic; 0: as in the schedule."""
    visits: float = 0.0
    """Blocks or sequences; 0: as in the schedule."""
    matrix_ops: float = 0.0
    received_bytes: float = 0.0
    """Bytes that a chip receives in a collective."""
    links: int = 0
    """Links of a chip in that collective."""
    cut_share: float = 1.0
    """Time over the narrowest cut / time over the links of a chip, by which it was estimated before."""


def _copies() -> tuple[Point, ...]:
    """Return copies; bytes are those of the array, each read and written."""
    sizes = {2: 3.04, 4: 3.73, 8: 7.47, 16: 12.2, 32: 22.3, 8192: 5350.0}
    on_v7x = (
        Point("XLA copy", "tpu7x", f"{mib} MiB", published_us, RECIPES, COPY, compiled="copy on tpu7x", scale=mib / 32,
              hbm_bytes=2 * mib * MIB, is_fitted=mib in (4, 32))
        for mib, published_us in sizes.items()
    )  # fmt: skip
    on_v6e = Point("XLA copy", "v6e", "33.5 MB", 49.4, RECIPES, COPY, is_fitted=True, compiled="copy on v6e",
                   hbm_bytes=64 * MIB)  # fmt: skip
    return (on_v6e, *on_v7x)


def _grouped() -> tuple[Point, ...]:
    """Return grouped products: experts, their shape, the groups that have rows, and rows of each."""
    runs = (
        ("gmm_v2 64 x 4096 x 2048 bf16", "30 groups x 3", 159.8, 30, 4096 * 2048 * 2, False),
        ("gmm_v2 64 x 4096 x 2048 fp8", "30 groups x 3", 81.9, 30, 4096 * 2048, True),
        ("gmm_v2 512 x 4096 x 256 bf16", "72 groups x 1", 71.8, 72, 4096 * 256 * 2, True),
        ("gmm_v2 512 x 512 x 4096 fp8", "72 groups x 1", 70.4, 72, 512 * 4096, False),
        ("gmm_v2 512 x 4096 x 256 fp8", "72 groups x 1", 57.5, 72, 4096 * 256, False),
    )
    return tuple(
        Point(name, "tpu7x", shape, published_us, GMM, KERNEL, is_fitted, name, hbm_bytes=groups * size, visits=groups)
        for name, shape, published_us, groups, size, is_fitted in runs
    )


def _blocked() -> tuple[Point, ...]:
    """Return blocked products of the documentation of jax; a host's clock, less the 0.1 ms that an empty call takes."""
    small, large = "blocked product, 128 x 128 x 128", "blocked product, 512 x 1024 x 1024"
    runs = (
        (small, 1024, 200.0, 1024, False), (small, 4096, 11_700.0, 1024, True), (small, 8192, 91_700.0, 1024, False),
        (large, 4096, 790.0, 4096, False), (large, 8192, 6000.0, 4096, True),
    )  # fmt: skip
    return tuple(
        Point(name, "v5e", f"{size}^3", published_us, JAX_MATMUL, KERNEL, is_fitted, name, (size / compiled) ** 3)
        for name, size, published_us, compiled, is_fitted in runs
    )


def _products() -> tuple[Point, ...]:
    in_and_out = 8192 * 8192 * 2
    return (
        Point("XLA product", "v5e", "8192^3", 5950.0, JAX_MATMUL, COPY, True, "product on v5e",
              hbm_bytes=in_and_out * 17),
        Point("XLA product", "v6e", "8192^3", 1329.0, RECIPES, COPY, core_us=1198.0,
              hbm_bytes=3 * in_and_out, matrix_ops=V6E_MATRIX_OPS),
    )  # fmt: skip


def _attention() -> tuple[Point, ...]:
    """Return paged attention, version 3; 128 sequences of 1,537 keys, or prompts of 2,048 and 1,024 tokens."""
    page_bytes = 2 * 128 * 2
    decode = (
        ("4/1 heads, page 128", 1, 582.0, 520.0, True), ("4/1 heads, page 256", 1, 543.0, 481.0, False),
        ("4/2 heads, page 128", 2, 326.0, 232.0, False), ("4/2 heads, page 256", 2, 288.0, 223.0, True),
        ("8/4 heads, page 256", 4, 420.0, 181.0, False),
    )  # fmt: skip
    prompts = (
        ("2 x 2048 tokens, 4/1 heads", 194.6, 143.8, True), ("2 x 2048 tokens, 4/2 heads", 344.0, 156.8, True),
        ("2 x 2048 tokens, 8/4 heads", 506.0, 239.8, False), ("1024 tokens, 4/1 heads", 33.4, 24.1, False),
        ("1024 tokens, 4/2 heads", 57.7, 26.2, False), ("1024 tokens, 8/4 heads", 83.5, 38.8, False),
    )  # fmt: skip
    return (
        *(
            Point("paged attention v3", "v6e", shape, published_us, ATTENTION_BASELINES, ATTENTION, is_fitted,
                  core_us=core_us, hbm_bytes=128 * 1537 * heads * page_bytes, visits=128)
            for shape, heads, published_us, core_us, is_fitted in decode
        ),
        *(
            Point("paged attention v3", "v6e", shape, published_us, ATTENTION_BASELINES,
                  PROMPT_ATTENTION if "/1" in shape else STRIDED_ATTENTION, is_fitted, core_us=core_us)
            for shape, published_us, core_us, is_fitted in prompts
        ),
        *(
            Point("paged attention, older", "tpu7x", f"4/1 heads, page {page}", published_us,
                  "github.com/sgl-project/sglang-jax/pull/648, CI baselines", ATTENTION,
                  core_us=69.0, hbm_bytes=128 * 1537 * page_bytes, visits=128)
            for page, published_us in ((128, 159.0), (256, 153.0))
        ),
    )  # fmt: skip


def _collectives() -> tuple[Point, ...]:
    gathers = {1.57: 21.9, 6.29: 48.7, 25.2: 155.0, 101.0: 576.0, 403.0: 2252.0}
    reduced = 2 * 255 / 256 * 606e6
    return (
        *(
            Point("XLA all-gather", "tpu7x", f"4 chips, {megabytes} MB", published_us, RECIPES, COLLECTIVE,
                  is_fitted=megabytes in (1.57, 6.29), received_bytes=megabytes * 1e6, links=2, cut_share=2 / 3)
            for megabytes, published_us in gathers.items()
        ),
        Point("XLA all-reduce", "v6e", "256 chips, 606 MB", 5120.0, RECIPES, COLLECTIVE, received_bytes=reduced,
              links=4, cut_share=1 / 16),
    )  # fmt: skip


POINTS: tuple[Point, ...] = (
    *_copies(),
    *_grouped(),
    *_blocked(),
    *_products(),
    *_attention(),
    *_collectives(),
)
"""Copies first, then kernels, products, attention and collectives.

Core times of attention are read by hand from its compiled schedule, within 10 %. The grouped products' runs have more
rows than groups: the padding lies in the last group.
"""
