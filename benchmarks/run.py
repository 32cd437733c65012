"""Throughput of the in-process engine, in turn with transformers' `generate` on the same checkpoint and prompts.

    python -m benchmarks.run [--size small] [--devices 2] [--workloads W1,W2] [--repeats 5]
                             [--no-transformers] [--out FILE.json]

The two take turns repeat by repeat, so that the machine's slow changes meet both. Leave it idle all the same: torch's
threads wait for each other by spinning, and another busy process slows them tenfold.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stderr
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Any, Self

import jax

from benchmarks.figures import PARTS
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, Workload, prompts_of
from rayserve_moe.checkpoints.model_path import SYNTHETIC_PREFIX, resolve_model_path
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.inprocess.engine import Engine

CLOCK = ("steps", *(f"{part}_s" for part in PARTS))
PACKAGES = ("jax", "transformers", "torch")
BUSY_LOAD = 0.75
"""Runnable processes, on average over the last minute, that an idle machine does not have."""
RESULTS = Path(__file__).parent / "results"


class TransformersPeer:
    """The child process that runs transformers; `facts` says how."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.transformers_peer", str(model)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._read()

    def run(self, workload: Workload, prompts: list[list[int]], *, seed: int) -> dict[str, float]:
        """Let it generate, and check that it did all of the work."""
        request = {"prompts": prompts, "num_new_tokens": workload.num_new_tokens, "n": workload.n, "seed": seed}
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        answer = self._read()
        check_complete(answer["num_new_tokens"], workload)
        return {"seconds": answer["seconds"]}

    def _read(self) -> dict[str, Any]:
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the transformers process has ended; its last words are above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__(None, None, None)


def run_engine(engine: Engine, workload: Workload, *, prompts: list[list[int]], seed: int) -> dict[str, float]:
    """Generate with our engine; returns the seconds it took and the step clock's part of them."""
    sampling = {
        "max_new_tokens": workload.num_new_tokens,
        "n": workload.n,
        "temperature": float(workload.n > 1),
        "seed": seed,
        "ignore_eos": True,
    }
    before = engine.loop.statistics()
    with redirect_stderr(io.StringIO()):  # not a terminal: no progress bar inside the measurement
        started = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - started
    after = engine.loop.statistics()
    check_complete(sum(len(answer["output_ids"]) for answer in answers), workload)
    return {"seconds": seconds, **{name: after[name] - before[name] for name in CLOCK}}


def check_complete(num_new_tokens: int, workload: Workload) -> None:
    """Refuse a run that did less, or more, than its workload."""
    if num_new_tokens != workload.total_new_tokens:
        raise RuntimeError(f"{num_new_tokens} tokens came out of {workload}, not {workload.total_new_tokens}")


def measure(name: str, engine: Engine, *, peer: TransformersPeer | None, repeats: int) -> dict[str, Any]:
    """Run a workload `repeats` times on each side in turn, after an uncounted turn of each."""
    workload = WORKLOADS[name]
    ours, theirs = [], []
    for repeat in range(-1, repeats):
        prompts = prompts_of(name, repeat, vocab_size=engine.card.vocab_size)
        ours.append(run_engine(engine, workload, prompts=prompts, seed=repeat + 1))
        if peer is not None:
            theirs.append(peer.run(workload, prompts, seed=repeat + 1))
        rates = [f"{workload.total_new_tokens / side[-1]['seconds']:.1f}" for side in (ours, theirs) if side]
        print(f"{name} {repeat + 1}/{repeats}: {' against '.join(rates)} output tokens/s", file=sys.stderr)
    return {"workload": asdict(workload), "ours": ours[1:], "theirs": theirs[1:]}


def machine_facts(load_before: float) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "load_before": round(load_before, 2),
        "versions": {name: metadata.version(name) for name in PACKAGES if util.find_spec(name)},
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line; unknown workloads are refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["tiny", "small", "mid"], default="small")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2, help="devices of our engine; on a CPU, emulated ones")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/SIZE.json")
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads.split(",")
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload {min(unknown)}; there are {', '.join(WORKLOADS)}")
    return arguments


def main() -> None:
    """Measure, write the result file, print its tables."""
    arguments = parse_arguments()
    with_peer = not arguments.no_transformers and util.find_spec("torch") is not None
    if not with_peer and not arguments.no_transformers:
        print("torch is not installed: transformers is left out (`make bench` installs it)", file=sys.stderr)
    load_before = os.getloadavg()[0]
    if load_before > BUSY_LOAD:
        print("the machine is busy: trust no figure, least of all transformers' (its threads spin)", file=sys.stderr)
    result: dict[str, Any] = {"size": arguments.size, "repeats": arguments.repeats}
    path = resolve_model_path(SYNTHETIC_PREFIX + arguments.size, cache_directory=default_cache_directory())
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(str(path), devices_per_host=arguments.devices))
        peer = stack.enter_context(TransformersPeer(path)) if with_peer else None
        result["machine"] = machine_facts(load_before)
        result["num_parameters"] = sum(leaf.size for leaf in jax.tree.leaves(engine.runner.params))
        result["ours"] = {"dtype": str(engine.runner.dtype), "devices": arguments.devices}
        result["theirs"] = peer.facts if peer else None
        result["workloads"] = {
            name: measure(name, engine, peer=peer, repeats=arguments.repeats) for name in arguments.workloads
        }
    out = arguments.out or RESULTS / f"{arguments.size}{'' if with_peer else '-alone'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(tables(result))


if __name__ == "__main__":
    main()
