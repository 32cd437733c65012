"""Throughput of the in-process engine, in turn with transformers' `generate` on the same checkpoint and prompts.

    python -m benchmarks.run [--size small] [--devices 1] [--workloads W1,W2] [--repeats 5]
                             [--no-transformers] [--transformers-dtype float32] [--out FILE.json]

Transformers computes in the checkpoint's dtype unless told otherwise. On a processor without bfloat16 products float32
is the faster of the two for it, and the one to measure against.

The two take turns repeat by repeat, so that the machine's slow changes meet both. Leave it idle all the same: torch's
threads wait for each other by spinning, and another busy process slows them tenfold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import Any, Self

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, num_parameters, save
from benchmarks.engine_runs import check_complete, run_engine
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, Workload, add_workload_options, prompts_of
from rayserve_moe.inprocess.engine import Engine


class TransformersPeer:
    """The child process that runs transformers; `facts` says how."""

    def __init__(self, model: Path, dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.transformers_peer", str(model), dtype]
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


def measure(name: str, engine: Engine, *, peer: TransformersPeer | None, repeats: int) -> dict[str, Any]:
    """Run a workload `repeats` times on each side in turn, after an uncounted turn of each."""
    workload = WORKLOADS[name]
    ours, theirs = [], []
    for repeat in range(-1, repeats):
        prompts = prompts_of(name, repeat, vocab_size=engine.card.vocab_size)
        ours.append(run_engine(engine, workload, prompts=prompts, seed=repeat + 1)[0])
        if peer is not None:
            theirs.append(peer.run(workload, prompts, seed=repeat + 1))
        rates = [f"{workload.total_new_tokens / side[-1]['seconds']:.1f}" for side in (ours, theirs) if side]
        note(f"{name} {repeat + 1}/{repeats}: {' against '.join(rates)} output tokens/s")
    return {"workload": asdict(workload), "ours": ours[1:], "theirs": theirs[1:]}


def parse_arguments() -> argparse.Namespace:
    """Read the command line; unknown workloads are refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_options(parser)
    parser.add_argument("--devices", type=int, default=1, help="devices of our engine; on a CPU, emulated ones")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--transformers-dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    return parser.parse_args()


def main() -> None:
    """Measure, write the result file, print its tables."""
    arguments = parse_arguments()
    with_peer = not arguments.no_transformers and util.find_spec("torch") is not None
    if not with_peer and not arguments.no_transformers:
        note("torch is not installed: transformers is left out (`make bench` installs it)")
    load_before = load_before_start()
    result: dict[str, Any] = {"size": arguments.size, "repeats": arguments.repeats}
    path = checkpoint_of(arguments.size)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(str(path), devices_per_host=arguments.devices))
        peer = stack.enter_context(TransformersPeer(path, arguments.transformers_dtype)) if with_peer else None
        result["machine"] = machine_facts(load_before)
        result["num_parameters"] = num_parameters(path)
        result["ours"] = {"dtype": str(engine.runner.dtype), "devices": arguments.devices}
        result["theirs"] = peer.facts if peer else None
        result["workloads"] = {
            name: measure(name, engine, peer=peer, repeats=arguments.repeats) for name in arguments.workloads
        }
    save(result, arguments.out or RESULTS / f"{arguments.size}{'' if with_peer else '-alone'}.json")
    print(tables(result))


if __name__ == "__main__":
    main()
