"""Shares of a chip's specification that devices reach: constants fitted to published device times, and their spread.

`python -m benchmarks.calibration` prints the published times beside the estimates, and fits the constants.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.tools.estimate.chips import OVERHEAD_S, Chip

COPY, KERNEL, ATTENTION, PROMPT_ATTENTION, STRIDED_ATTENTION, PRODUCT, COLLECTIVE = (
    "copy",
    "kernel",
    "decode attention",
    "prefill attention",
    "prefill attention, interleaved heads",
    "product",
    "collective",
)
"""Kinds of ops, which differ in what they wait for.

XLA's own ops; kernels that visit blocks; paged attention of single tokens, of prompts, and of prompts with strided
loads of KV heads that share rows (none of our kernels); ops bound by matrix units; collectives of XLA.
"""


@dataclass(frozen=True)
class Constant:
    """A constant of the estimate with the measurement that it comes from."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Spread:
    """Minimum and maximum of published time / estimate of a kind."""

    min_ratio: float
    max_ratio: float


@dataclass(frozen=True)
class Rates:
    """Shares of a device's figures that ops reach, and what they lose to waiting."""

    hbm_share: float = 1.0
    """Share of the peak bandwidth of HBM."""
    matrix_share: float = 0.0
    """Share of the peak of the matrix units; 0: bundles alone count."""
    exposed_share: float = 0.0
    """Share of the smaller of core time and HBM time of decode attention that the larger one does not hide."""
    wait_s: float = 0.0
    """Latency of a copy."""
    adds_ends: bool = False
    """True if the code and waits before a kernel's first copy, and its first visit, are added rather than hidden."""
    prompt_stall: float = 1.0
    """Cycles per bundle of attention over prompts."""
    strided_stall: float = 1.0
    """The same with strided loads."""
    collective_s: float = OVERHEAD_S
    """Time of a collective of more than two devices before its first byte."""


AT_PEAK = Rates()
"""Every op at the peaks of the specification."""

GMM = "github.com/vllm-project/tpu-inference/issues/3520"
RECIPES = "github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks"
ATTENTION_BASELINES = "github.com/sgl-project/sglang-jax/pull/913, CI baselines"
JAX_MATMUL = "docs.jax.dev, Pallas TPU matrix multiplication"

CONSTANTS: tuple[Constant, ...] = (
    Constant("hbm_share", 0.86, "of peak HBM", f"copies on v6e and v7x: {RECIPES}; v5e and v5p assumed equal"),
    Constant("matrix_share", 0.94, "of peak", f"product on v5e: {JAX_MATMUL}"),
    Constant("wait_us", 0.2, "us", f"grouped products on v7x: {GMM}; blocked products on v5e: {JAX_MATMUL}"),
    Constant("exposed_share", 0.1, "of the smaller", f"paged attention on v6e: {ATTENTION_BASELINES}"),
    Constant("prompt_stall", 1.35, "cycles per bundle", f"one KV head on v6e: {ATTENTION_BASELINES}"),
    Constant("strided_stall", 2.2, "cycles per bundle", f"two KV heads on v6e: {ATTENTION_BASELINES}"),
    Constant("collective_us", 13.0, "us", f"all-gathers of four v7x: {RECIPES}"),
)
"""Fields of `Rates`, fitted by `python -m benchmarks.calibration --fit` to the points that are marked for it."""

SPREADS: dict[str, Spread] = {
    COPY: Spread(0.97, 1.21),
    KERNEL: Spread(0.92, 1.21),
    ATTENTION: Spread(0.99, 1.27),
    PROMPT_ATTENTION: Spread(0.99, 1.63),
    STRIDED_ATTENTION: Spread(0.96, 0.99),
    PRODUCT: Spread(1.00, 1.04),
    COLLECTIVE: Spread(1.00, 1.52),
}
"""Published time / calibrated estimate by kind, over all points.

The maximum of attention over prompts is that of interleaved heads: no published time tells which of the two a kernel
without strided loads is like.
"""


STEP_SPREAD = Spread(0.92, 1.34)
"""Range of whole steps over their calibrated estimate (`benchmarks/results/step_estimate.json`)."""


def calibrated(chip: Chip) -> Rates:
    """Return the rates that published device times support."""
    known = {constant.name: constant.value for constant in CONSTANTS}
    return Rates(
        hbm_share=chip.hbm_share,
        matrix_share=known["matrix_share"],
        exposed_share=known["exposed_share"],
        wait_s=known["wait_us"] * 1e-6,
        adds_ends=True,
        prompt_stall=known["prompt_stall"],
        strided_stall=known["strided_stall"],
        collective_s=known["collective_us"] * 1e-6,
    )
