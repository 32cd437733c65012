"""Throughput of the in-process engine, in turn with transformers' `generate` on the same checkpoint and prompts.

    python -m benchmarks.run [--size small] [--devices 1] [--workloads W1,W2] [--repeats 5]
                             [--no-transformers] [--transformers-dtype float32] [--out FILE.json]

Transformers computes in the checkpoint's dtype unless told otherwise. On a processor without bfloat16 products float32
is the faster of the two for it, and the one to measure against.

The two take turns repeat by repeat, so that the machine's slow changes meet both, and transformers is stopped while it
is not asked. Leave the machine idle all the same: torch's threads wait for each other by spinning, and another busy
process slows them tenfold.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import asdict
from importlib import util
from typing import Any

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import run_engine
from benchmarks.peers.process import PeerProcess, exit_on_termination
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, add_workload_options, prompts_of
from rayserve_moe.inprocess.engine import Engine


def measure(name: str, engine: Engine, *, peer: PeerProcess | None, repeats: int) -> dict[str, Any]:
    """Run a workload `repeats` times on each side in turn, after an uncounted turn of each."""
    workload = WORKLOADS[name]
    ours, theirs = [], []
    for repeat in range(-1, repeats):
        prompts = prompts_of(name, repeat, vocab_size=engine.card.vocab_size)
        ours.append(run_engine(engine, workload, prompts=prompts, seed=repeat + 1)[0])
        if peer is not None:
            theirs.append(peer.run(workload, prompts, seed=repeat + 1)[0])
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
    exit_on_termination()
    with_peer = not arguments.no_transformers and util.find_spec("torch") is not None
    if not with_peer and not arguments.no_transformers:
        note("torch is not installed: transformers is left out (`make bench` installs it)")
    load_before = load_before_start()
    path = checkpoint_of(arguments.size)
    command = [sys.executable, "-m", "benchmarks.transformers_peer", str(path), arguments.transformers_dtype]
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(str(path), devices_per_host=arguments.devices))
        peer = stack.enter_context(PeerProcess(command, environment={})) if with_peer else None
        result = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
        result["theirs"] = peer.facts if peer else None
        result["workloads"] = {
            name: measure(name, engine, peer=peer, repeats=arguments.repeats) for name in arguments.workloads
        }
    save(result, arguments.out or RESULTS / f"{arguments.size}{'' if with_peer else '-alone'}.json")
    print(tables(result))


if __name__ == "__main__":
    main()
