"""Seconds, reads at once and bytes of loading one checkpoint: from a disk, from an object store, and after a cut.

    python -m benchmarks.loading [--gigabytes 2] [--rate 25e6] [--out FILE.json]

Every load is a process of its own that reads a host's share into host memory. The object stores are fsspec's in the
memory of that process, and an HTTP server on this machine whose connections are throttled, as a bucket's are.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, save
from benchmarks.loading_table import loading as as_table
from rayserve_moe.checkpoints import pieces
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.model.family_table import family_of, spec_from_config
from rayserve_moe.model.parameters import parameter_specs

EXPERT_BYTES = 3 * 2048 * 768 * 2
NUM_LAYERS = 4
MODEL = replace(
    PRESETS["tiny"],
    vocab_size=32_768,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
)
CUT_AT = 0.5
"""Part of the bytes after which the load that is cut off is killed."""


def load_once(case: dict[str, Any]) -> dict[str, Any]:
    """Load the share that a case describes; returns seconds, bytes held, and the most memory in use, in bytes."""
    if case.get("connections"):
        pieces.NUM_CONNECTIONS = case["connections"]
    if case["url"].startswith("memory://"):
        system = fsspec.filesystem("memory")
        for file in Path(case["folder"]).iterdir():
            system.pipe_file(f"/bucket/model/{file.name}", file.read_bytes())
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    files = open_checkpoint(case["url"], cache=Path(case["cache"]) if case.get("cache") else None)
    tree = parameter_specs(spec_from_config(files.config), dtype="bfloat16")
    slots = None
    if case.get("experts"):
        experts = np.arange(*case["experts"])
        slots = np.tile(experts, (NUM_LAYERS, 1))
        tree = {
            group: {name: _cut(spec, len(experts)) for name, spec in specs.items()} for group, specs in tree.items()
        }
    one = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("devices",)), PartitionSpec())
    source = WeightSource(files, family_of(files.config).CHECKPOINT_RULES, slots)
    held = load_parameters(
        source, tree, sharding_of=lambda _: one, in_host_memory=True, num_threads=case.get("threads", 0)
    )
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    share = sum(values.nbytes for staged in jax.tree.leaves(held) for values, _ in staged.shards)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu, "share_bytes": share, "peak_bytes": after.ru_maxrss * 1024}


def _cut(spec: Any, num_slots: int) -> Any:
    return replace(spec, shape=(spec.shape[0], num_slots, *spec.shape[2:])) if spec.num_experts else spec


@contextmanager
def served(folder: Path, rate: float) -> Iterator[str]:
    """Yield a server of the folder in a process of its own; its URL."""
    command = [sys.executable, "-m", "benchmarks.range_server", str(folder), "--rate", str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def counts_of(url: str) -> dict[str, int]:
    """Return the counts of sent bytes and reads of a server."""
    with urllib.request.urlopen(f"{url}/:counts") as answer:
        return json.load(answer)


def in_child(case: dict[str, Any]) -> dict[str, Any]:
    """Run `load_once` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.loading", "--case", json.dumps(case)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def over_http(folder: Path, rate: float, **case: Any) -> dict[str, Any]:
    """Load from a server of its own; what it sent is with the result."""
    with served(folder.parent, rate) as url:
        result = in_child({"url": f"{url}/{folder.name}", **case})
        return result | counts_of(url)


def cut_off(folder: Path, rate: float, cache: Path) -> dict[str, Any]:
    """Kill a load after a part of its bytes, go on in another process, then load a third time from what is kept."""
    num_bytes = open_checkpoint(folder).num_bytes
    with served(folder.parent, rate) as url:
        case = {"url": f"{url}/{folder.name}", "cache": str(cache)}
        begun = time.perf_counter()
        with subprocess.Popen([sys.executable, "-m", "benchmarks.loading", "--case", json.dumps(case)]) as child:
            while counts_of(url)["tensor_bytes"] < CUT_AT * num_bytes:
                time.sleep(0.05)
            child.send_signal(signal.SIGKILL)
            child.wait()
        first = {"seconds": time.perf_counter() - begun} | counts_of(url)
        time.sleep(1.0)
        before = counts_of(url)["tensor_bytes"]
        resumed = in_child(case)
        after = counts_of(url)["tensor_bytes"]
        kept = in_child(case)
        last = counts_of(url)["tensor_bytes"]
    return {
        "cut": first | {"tensor_bytes": before},
        "resumed": resumed | {"tensor_bytes": after - before},
        "kept": kept | {"tensor_bytes": last - after},
    }


def measure(folder: Path, *, rate: float, repeats: int) -> dict[str, Any]:
    """Measure all loads of a checkpoint."""
    num_experts = json.loads((folder / "config.json").read_text())["num_experts"]
    half = num_experts // 2
    kept = Path(tempfile.mkdtemp(dir=folder.parent))
    runs = {
        "disk, one thread": [in_child({"url": str(folder), "threads": 1}) for _ in range(repeats)],
        "disk, all cores": [in_child({"url": str(folder)}) for _ in range(repeats)],
        "memory": [in_child({"url": "memory://bucket/model", "folder": str(folder)}) for _ in range(repeats)],
        "http, 8 at once": [over_http(folder, rate, connections=8)],
        "http, 64 at once": [over_http(folder, rate) for _ in range(repeats)],
        "host 0 of 2": [over_http(folder, rate, experts=[0, half])],
        "host 1 of 2": [over_http(folder, rate, experts=[half, num_experts])],
    }
    runs |= {name: [result] for name, result in cut_off(folder, rate, kept).items()}
    files = open_checkpoint(folder)
    expert_bytes = sum(each.end - each.begin for name, each in files.tensors.items() if ".experts." in name)
    shutil.rmtree(kept)
    return {"num_bytes": files.num_bytes, "expert_bytes": expert_bytes, "rate": rate, "runs": runs}


def main() -> None:
    """Write the checkpoint, load it in every way, print the table and save the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=25e6, help="bytes per second of one connection")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=RESULTS / "loading.json")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(load_once(options.case)))
        return
    load = load_before_start()
    num_experts = 2 * round(options.gigabytes * 1e9 / EXPERT_BYTES / NUM_LAYERS / 2)
    model = replace(MODEL, num_experts=num_experts)
    folder = write_checkpoint(options.folder / f"loading-{os.getuid()}" / "model", model, max_shard_bytes=256 << 20)
    measured = measure(folder, rate=options.rate, repeats=options.repeats) | {"machine": machine_facts(load)}
    print(as_table(measured))
    save({"loading": measured}, options.out)


if __name__ == "__main__":
    main()
