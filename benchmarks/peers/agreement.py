"""Whether peers compute the model that we compute: greedy tokens of each against ours, in float32.

    python -m benchmarks.peers.agreement --size olmoe-tiny [--sides vllm,llamacpp] [--peers DIR]

With `XLA_FLAGS=--xla_backend_optimization_level=0` our side compiles in seconds, models with recurrent layers too. The
weights are those of the preset drawn wider, so that every bias, norm and sink shows. llama.cpp rounds the ends of
yarn's ramp to whole dimensions whatever a config says: here the config says so too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.engine_runs import run_engine
from benchmarks.peers.folders import add_peers_option, installed
from benchmarks.peers.process import exit_on_termination
from benchmarks.peers.run import SCRIPTS, facts_for, start
from benchmarks.workloads import FIRST_PLAIN_ID, Workload
from rayserve_moe.checkpoints.synthetic import (
    FAMILY_PRESETS,
    PRESETS,
    Drawn,
    SyntheticConfig,
    SyntheticModel,
    write_checkpoint,
)
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.model.family_table import spec_from_config

WORKLOAD = Workload(num_requests=8, prompt_len=40, num_new_tokens=32)
FEW_PROGRAMS = {"max_step_tokens": 64, "precompile_bs_paddings": [16], "structured_output": False}
"""Settings of our engine: a step for prompts and one for decoding, which compile in seconds."""
WIDER = Drawn(scale=0.1, norm_jitter=0.2)


def model_of(size: str) -> SyntheticConfig | SyntheticModel:
    """Return the preset with weights that show, and with a yarn ramp that every peer knows."""
    model = replace((PRESETS | FAMILY_PRESETS)[size], drawn=WIDER)
    if isinstance(model, SyntheticModel) and (scaling := model.config.get("rope_scaling")):
        return replace(model, config={**model.config, "rope_scaling": {**scaling, "truncate": True}})
    return model


def num_equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """Return tokens before the first that differs, over all answers."""
    return sum(
        next((i for i, (one, other) in enumerate(zip(*both, strict=True)) if one != other), len(both[0]))
        for both in zip(ours, theirs, strict=True)
    )


def main() -> None:
    """Print how many tokens of how many are equal on each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*PRESETS, *FAMILY_PRESETS], default="tiny")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SCRIPTS), help="comma-separated")
    add_peers_option(parser)
    chosen = parser.parse_args()
    exit_on_termination()
    folders, model = chosen.peers.resolve(), model_of(chosen.size)
    shape = (WORKLOAD.num_requests, WORKLOAD.prompt_len)
    prompts = np.random.default_rng(0).integers(FIRST_PLAIN_ID, model.vocab_size, shape).tolist()
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory) / "model", model, dtype="float32")
        with Engine(str(path), dtype="float32", max_model_len=1024, **FEW_PROGRAMS) as engine:
            _, ours = run_engine(engine, WORKLOAD, prompts=prompts, seed=0)
        for side in chosen.sides:
            facts = facts_for(installed(folders, side), side, spec_from_config(model.hf_config("float32")))
            with start(side, path, peers=folders, facts=facts) as peer:
                _, theirs = peer.run(WORKLOAD, prompts, seed=0)
            print(f"{chosen.size}: {side} {num_equal(ours, theirs)} of {WORKLOAD.total_new_tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
