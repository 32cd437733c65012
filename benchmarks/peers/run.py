"""Our engine in turn with vLLM and llama.cpp, each on all cores and in bfloat16, on the same checkpoint and prompts.

    python -m benchmarks.peers.install [--peers DIR]
    python -m benchmarks.peers.run --size small [--sides vllm,llamacpp] [--peers DIR] [--workloads W1,W2] [--repeats 5]
    python -m benchmarks.peers.run --size mid --sides llamacpp --experts int8 --workloads W1,W2
    RAYSERVE_MOE_CPU_LEVEL=avx2 python -m benchmarks.peers.run --size small --sides llamacpp,xla --out FILE.json
    chrt -r 1 python -m benchmarks.peers.run --size gemma-4-mid --sides llamacpp --max-others 0.06

`--size` names a synthetic preset. The side `xla` is our engine without native kernels, in float32. The first command
builds each peer for this processor and records its build flags and environment in the result. Processes of the other
sides are stopped during a run. The sides alternate repeat by repeat, so that slow changes of the machine affect all of
them; leave the machine idle nevertheless. The read bandwidth is the maximum of measurements before, between and after
the workloads. `python -m benchmarks.peers.agreement` checks that a peer computes the same model. With experts in int8,
llama.cpp has all matrices in Q8_0: int8 with a scale for every 32 weights. On a machine that others use, real-time
priority (`chrt`) keeps their processes off the cores of both sides, and `--max-others` tries a run again during which
they used more than this share of the cores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn, run_engine
from benchmarks.peers.bandwidth import most_tokens_per_s, read_bytes_per_s
from benchmarks.peers.folders import add_peers_option, installed
from benchmarks.peers.process import PeerProcess, exit_on_termination
from benchmarks.peers.quiet import undisturbed
from benchmarks.peers.tables import OURS
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, Workload, add_workload_options, prompts_of
from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.execution.native_library import OPTIONS, find_compilers, register_native_kernels
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.kernels.cpu_native.layout import DEFINITIONS
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.layers.latent import LatentAttention
from rayserve_moe.model.spec import ModelSpec

HERE, INT8, XLA = Path(__file__).parent, "int8", "xla"
SCRIPTS = {"vllm": "vllm_peer.py", "llamacpp": "llamacpp_peer.py"}
VLLM_LATENT_WIDTH = 512 + 64
"""The one width of a cached row for which vLLM has latent attention on a processor."""


class XlaEngine:
    """Our engine without native kernels, with the interface of a peer."""

    def __init__(self, engine: Engine) -> None:
        self.facts = {"version": "in float32", "cores": sorted(os.sched_getaffinity(0))}
        self._engine = engine

    def run(
        self, workload: Workload, prompts: list[list[int]], *, seed: int
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Generate; returns the run and the ids of every choice."""
        return run_engine(self._engine, workload, prompts=prompts, seed=seed)


def measure(
    name: str,
    engine: Engine,
    *,
    peers: Mapping[str, PeerProcess | XlaEngine],
    repeats: int,
    max_others: float | None = None,
) -> dict[str, Any]:
    """Run a workload `repeats` times on each side in turn, after an uncounted turn of each; see `undisturbed`."""
    workload = WORKLOADS[name]
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in (OURS, *peers)}
    for repeat in range(-1, repeats):
        prompts = prompts_of(name, repeat, vocab_size=engine.card.vocab_size)
        for side in in_turn(list(runs), repeat + 1):
            run = partial(_run, side, engine, peers, workload=workload, prompts=prompts, seed=repeat + 1)
            if max_others is None:
                runs[side].append(run())
            else:
                found, share = undisturbed(run, max_others)
                runs[side].append(found | {"others": share})
        rates = ", ".join(f"{side} {workload.total_new_tokens / runs[side][-1]['seconds']:.1f}" for side in runs)
        note(f"{name} {repeat + 1}/{repeats}: {rates} output tokens/s")
    return {"workload": asdict(workload), "runs": {side: each[1:] for side, each in runs.items()}}


def _run(
    side: str,
    engine: Engine,
    peers: Mapping[str, PeerProcess | XlaEngine],
    *,
    workload: Workload,
    prompts: list[list[int]],
    seed: int,
) -> dict[str, float]:
    """Run a workload once on one side."""
    if side == OURS:
        return run_engine(engine, workload, prompts=prompts, seed=seed)[0]
    return peers[side].run(workload, prompts, seed=seed)[0]


def facts_for(facts: dict[str, Any], name: str, spec: ModelSpec) -> dict[str, Any]:
    """Return the facts with the environment that a peer needs for this model: vLLM expands latents it does not know."""
    latents = [mixer for mixer in spec.mixers if isinstance(mixer, LatentAttention)]
    if name != "vllm" or all(mixer.row_width == VLLM_LATENT_WIDTH for mixer in latents):
        return facts
    return facts | {"environment": facts["environment"] | {"VLLM_MLA_DISABLE": "1"}}


def start(name: str, model: Path, *, peers: Path, facts: dict[str, Any], experts: str = "bfloat16") -> PeerProcess:
    """Start a peer by the Python of its folder, in its environment."""
    folder = peers / name
    command = [folder / "bin" / "python", HERE / SCRIPTS[name], model, folder, *([experts] if experts == INT8 else [])]
    return PeerProcess([str(word) for word in command], environment=facts["environment"])


def our_facts(engine: Engine) -> dict[str, Any]:
    """Return how our side was built and what it runs on, in the fields of the peers."""
    kernels = engine.runner.config.kernels.name
    if kernels != "cpu_native":
        return {"kernels": kernels, "cores": sorted(os.sched_getaffinity(0))}
    level, compiler = register_native_kernels(), Path(next(iter(find_compilers()), "")).name
    built = {"level": level.name, "compiler": compiler, "compiler_flags": [*OPTIONS, *level.options, *DEFINITIONS]}
    return {"kernels": kernels, **built, "cores": sorted(os.sched_getaffinity(0))}


def parse_arguments() -> argparse.Namespace:
    """Read the command line; unknown workloads are refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_options(parser)
    add_peers_option(parser)
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SCRIPTS), help="comma-separated")
    parser.add_argument("--experts", choices=["bfloat16", INT8], default="bfloat16", help="int8 with llamacpp alone")
    parser.add_argument("--max-others", type=float, help="share of the cores that other processes may use in a run")
    arguments = parser.parse_args()
    if arguments.experts == INT8 and arguments.sides != ["llamacpp"]:
        parser.error("--experts int8 goes with --sides llamacpp")
    return arguments


def main() -> None:
    """Measure, write the result file, print its tables."""
    arguments = parse_arguments()
    exit_on_termination()
    load_before, path = load_before_start(), checkpoint_of(arguments.size)
    spec, bandwidths, workloads = spec_from_config(read_config(path)), [read_bytes_per_s()], {}
    others = [name for name in arguments.sides if name != XLA]
    found = {name: facts_for(installed(arguments.peers.resolve(), name), name, spec) for name in others}
    with ExitStack() as stack:
        peers: dict[str, PeerProcess | XlaEngine] = {
            name: stack.enter_context(
                start(name, path, peers=arguments.peers.resolve(), facts=facts, experts=arguments.experts)
            )
            for name, facts in found.items()
        }
        engine = stack.enter_context(
            Engine(str(path), dtype="bfloat16", expert_dtype=arguments.experts, max_model_len=1024)
        )
        if XLA in arguments.sides:
            xla = Engine(str(path), dtype="float32", cpu_kernels="off", max_model_len=1024)
            peers[XLA] = XlaEngine(stack.enter_context(xla))
        result = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
        result["ours"] |= our_facts(engine)
        for name in arguments.workloads:
            workloads[name] = measure(
                name, engine, peers=peers, repeats=arguments.repeats, max_others=arguments.max_others
            )
            bandwidths.append(read_bytes_per_s())
    bandwidth, experts = max(bandwidths), arguments.experts
    result["peers"] = {
        "facts": {name: peer.facts | found.get(name, {}) for name, peer in peers.items()},
        "read_bytes_per_s": bandwidth,
        "limits": {
            str(count): most_tokens_per_s(spec, count, bytes_per_s=bandwidth, expert_dtype=experts)
            for count in (1, 2, 4, 8, 16)
        },
        "workloads": workloads,
    }
    save(result, arguments.out or RESULTS / f"peers-{arguments.size}{'-int8' * (experts == INT8)}.json")
    print(tables(result))


if __name__ == "__main__":
    main()
