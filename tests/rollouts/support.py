"""Running the job, and comparing what it has written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rayserve_moe import Engine
from rayserve_moe.rollouts import load
from rayserve_moe.rollouts.batch_job import main
from rayserve_moe.rollouts.prompts import seed_of

NEW_TOKENS = 12
Samples = dict[tuple[str, int], dict[str, Any]]


def job(prompts: Path, out: Path, *more: str, n: int = 3) -> int:
    """Run the job in this process; returns its status."""
    return main([*_arguments(prompts, out, n), *more])


@contextmanager
def started_job(prompts: Path, out: Path, *more: str, n: int) -> Iterator[subprocess.Popen[str]]:
    """Run the job as a process of its own, for as long as the block at most."""
    command = [sys.executable, "-m", "rayserve_moe.rollouts.batch_job", *_arguments(prompts, out, n), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _arguments(prompts: Path, out: Path, n: int) -> list[str]:
    return ["--prompts", str(prompts), "--out", str(out), "--n", str(n), "--max-new-tokens", str(NEW_TOKENS)]


def samples_in(out: Path) -> Samples:
    """What was sampled, by prompt and number; each is there once."""
    loaded = load(out)
    samples: Samples = {}
    for i in range(len(loaded)):
        key = loaded.prompt_id[i], int(loaded.sample_index[i])
        assert key not in samples, f"{key} was written twice"
        routing = loaded.routed_experts(i)
        assert routing is not None and not routing.missing
        samples[key] = {
            "prompt_ids": loaded.prompt_ids[i].tolist(),
            "output_ids": loaded.output_ids[i].tolist(),
            "logprobs": loaded.logprobs[i],
            "rows": routing.rows,
            "finish_reason": loaded.table["finish_reason"][i].as_py(),
        }
    return samples


def assert_equal(found: Samples, wanted: Samples) -> None:
    """The same samples: ids exactly, log-probs and rows as far as float32 repeats itself in other company."""
    assert found.keys() == wanted.keys()
    for key, sample in found.items():
        other = wanted[key]
        assert (sample["prompt_ids"], sample["output_ids"]) == (other["prompt_ids"], other["output_ids"]), key
        assert sample["finish_reason"] == other["finish_reason"]
        np.testing.assert_allclose(sample["logprobs"], other["logprobs"], atol=1e-5)
        assert np.array_equal(sample["rows"], other["rows"])


def by_engine(engine: Engine, rows: list[dict[str, Any]], *, n: int, seed: int = 0) -> dict[tuple[str, int], list[int]]:
    """Output ids of every sample, from the engine itself, each asked for alone."""
    outputs = {}
    for row in rows:
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, **row.get("sampling_params", {})}
        sampling["sampling_seed"] = seed_of(seed, row["id"], sampling=sampling)
        ids = row.get("input_ids") or engine.tokenizer.encode(row["text"])
        for sample in range(n):
            answer = engine.generate(input_ids=ids, sampling_params={**sampling, "first_choice": sample})
            outputs[row["id"], sample] = answer["output_ids"]
    return outputs


def errors_in(out: Path) -> dict[int, str]:
    """Reasons by the positions of the rows that were given up."""
    found: dict[int, str] = {}
    for file in sorted((out / "errors").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            assert row["position"] not in found, "a row was given up twice"
            found[row["position"]] = row["reason"]
    return found


def summary_in(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())
