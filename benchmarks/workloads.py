"""What is measured: four shapes of work on random prompts, the same for every engine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS, PRESETS

FIRST_PLAIN_ID = 3
"""Ids below are special tokens of the synthetic tokenizer."""


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once. With n = 1 they are greedy, otherwise sampled at temperature 1."""

    num_requests: int
    prompt_len: int
    num_new_tokens: int
    n: int = 1

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of all requests; a prompt counts once, whatever its n."""
        return self.num_requests * self.prompt_len

    @property
    def total_new_tokens(self) -> int:
        """Output tokens of all choices of all requests."""
        return self.num_requests * self.n * self.num_new_tokens

    def __str__(self) -> str:
        choices = f"n = {self.n} x " if self.n > 1 else ""
        return f"{self.num_requests} x {self.prompt_len} in / {choices}{self.num_new_tokens} out"


WORKLOADS = {
    "W1": Workload(1, 128, 128),
    "W2": Workload(16, 128, 128),
    "W3": Workload(16, 512, 8),
    "W4": Workload(1, 256, 64, n=16),
}


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add what to run, on which checkpoint, how often, and where the result goes."""
    parser.add_argument("--size", choices=[*PRESETS, *FAMILY_PRESETS], default="small", help="synthetic preset")
    parser.add_argument("--workloads", type=_names, default=list(WORKLOADS), help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: a file of benchmarks/results named by the size")


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(WORKLOADS):
        raise argparse.ArgumentTypeError(f"unknown workload {min(unknown)}; there are {', '.join(WORKLOADS)}")
    return names


def prompts_of(name: str, repeat: int, *, vocab_size: int) -> list[list[int]]:
    """Draw the prompts of one repeat; the same arguments give the same ids. Repeat -1 is the warm-up."""
    workload = WORKLOADS[name]
    generator = np.random.default_rng([0, repeat + 1000, int(name.removeprefix("W"))])
    return generator.integers(FIRST_PLAIN_ID, vocab_size, (workload.num_requests, workload.prompt_len)).tolist()
