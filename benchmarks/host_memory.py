"""How many copies of its weights a host holds, counted from /proc: around updates, and around replacing its worker.

    python -m benchmarks.host_memory [--size mid] [--out FILE.json]

One host, its share the whole model. `private` is the anonymous memory of workers beyond what one with next to no
weights has, `sealed` what files of memory hold that workers and keepers have open, each counted once, `objects` what
Ray's object store has ever touched. All in units of the share: before, the most at once meanwhile, and after.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ray

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.kill_nodes import send_weights
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import pids_under
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.synthetic import ensure_checkpoint
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.control import WeightOrder

WORKER, KEEPER, RAYLET = "ray::HostWorker", "ray::WeightKeeper", "raylet"
LIMIT_S, POLL_S, SETTLE_S = 600.0, 0.02, 3.0
BLOCK_BYTES = 512
SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "num_pages": 80,
    "max_running_requests": 4,
    "max_step_tokens": 32,
    "precompile_bs_paddings": [4],
    "structured_output": False,
    "num_hosts": 1,
    "max_rebuilds_in_10_minutes": 1000,
    "max_rebuilds_in_hour": 1000,
}


class Held(NamedTuple):
    """Bytes, or copies, in private memory, in sealed files, and in the object store."""

    private: float
    sealed: float
    objects: float

    def in_units(self, share: int) -> Held:
        return Held(*(round(value / share, 2) for value in self))


def open_files(pids: Iterable[int], name: str) -> dict[tuple[int, int], int]:
    """Return bytes in memory of open files with this prefix, each once, by device and inode."""
    found = {}
    for pid in pids:
        for link in _links(pid):
            try:
                if os.readlink(link).startswith(name):
                    file = link.stat()
                    found[file.st_dev, file.st_ino] = file.st_blocks * BLOCK_BYTES
            except OSError:
                continue  # closed meanwhile
    return found


def _links(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []  # it has ended


def sealed_shares(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """Return bytes of every share of weights that processes have open, each once."""
    return open_files(pids, "/memfd:weights")


def anonymous_bytes(pid: int) -> int:
    """Return memory of a process that is no file's; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024


def held_now(*, base: float) -> Held:
    """Return the bytes of the processes that this one started; of a worker's memory, the part beyond `base` bytes."""
    workers, keepers, raylets = (pids_under(os.getpid(), title) for title in (WORKER, KEEPER, RAYLET))
    private = sum(max(0.0, anonymous_bytes(pid) - base) for pid in workers)
    objects = sum(open_files(raylets, "/dev/shm/plasma").values())
    return Held(private, sum(sealed_shares([*workers, *keepers]).values()), objects)


class Watch:
    """Has something done, and sees how much is held before, at the most, and after."""

    def __init__(self, *, base: float, share: int) -> None:
        self._base, self._share = base, share

    def around(self, do: Callable[[], object]) -> dict[str, Any]:
        """Return each number in units of the share; `together` is the most of all three at once."""
        before, seen, is_over = held_now(base=self._base), [], threading.Event()

        def sample() -> None:
            while not is_over.wait(POLL_S):
                seen.append(held_now(base=self._base))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            do()
        finally:
            is_over.set()
            thread.join()
        time.sleep(SETTLE_S)
        after, seen = held_now(base=self._base), [before, *seen]
        most = Held(*(max(values) for values in zip(*seen, strict=True)))
        measured = {"before": before, "most": most, "after": after}
        found = {name: held.in_units(self._share)._asdict() for name, held in measured.items()}
        return {**found, "together": round(max(map(sum, seen)) / self._share, 2), "samples": len(seen)}


def started(path: Path, programs: str, **settings: Any) -> ReplicaEngine:
    """Return a replica of one host."""
    chosen = {"model_path": str(path), "compile_cache": programs, **SETTINGS, **settings}
    return start_replica_engine(settings_from(chosen))


def replace_worker(engine: ReplicaEngine) -> None:
    """Kill the worker and wait for the next. TimeoutError after LIMIT_S."""
    recovery, deadline = engine.loop.recovery, time.monotonic() + LIMIT_S
    assert recovery is not None, "hosts can be replaced"
    before = recovery.num_rebuilds
    (worker,) = ray.get([each.process.remote() for each in engine.executor.workers])
    os.kill(worker.pid, signal.SIGKILL)
    while recovery.num_rebuilds == before or recovery.progress is not None:
        if time.monotonic() > deadline:
            raise TimeoutError("the worker is not replaced")
        time.sleep(POLL_S)


def read_weights(engine: ReplicaEngine, path: Path) -> None:
    """Update from a disk. RuntimeError where that is refused."""
    outcome = engine.loop.control.update_weights(WeightOrder(str(path), "0")).result(LIMIT_S)
    if not outcome.success:
        raise RuntimeError(outcome.message)


def base_bytes(programs: str) -> float:
    """Return anonymous memory of a worker without its weights: of the smallest model, programs found on disk."""
    path = checkpoint_of("tiny")
    started(path, programs).shutdown()
    engine = started(path, programs)
    try:
        time.sleep(SETTLE_S)
        (pid,) = pids_under(os.getpid(), WORKER)
        return anonymous_bytes(pid) - open_checkpoint(path).num_bytes
    finally:
        engine.shutdown()


def measure(paths: tuple[Path, Path], watch: Watch, programs: str) -> dict[str, dict[str, Any]]:
    """Measure all moments by name, with sent weights kept and not."""
    first, other = paths
    started(first, programs).shutdown()
    rows: dict[str, dict[str, Any]] = {}

    def see(name: str, do: Callable[[], object]) -> None:
        rows[name] = watch.around(do)
        note(f"{name}: {rows[name]}")

    engine = started(first, programs)
    try:
        see("update from disk", lambda: read_weights(engine, other))
        see("another from disk", lambda: read_weights(engine, first))
        see("a third from disk", lambda: read_weights(engine, other))
        see("worker replaced, from disk", lambda: replace_worker(engine))
        see("update sent", lambda: send_weights(engine, first))
        see("another sent", lambda: send_weights(engine, other, update_id="another"))
        see("worker replaced, from its share", lambda: replace_worker(engine))
        see("update from disk, of what was sent", lambda: read_weights(engine, first))
    finally:
        engine.shutdown()
    engine = started(first, programs, keep_sent_weights="off")
    try:
        see("update sent, not kept", lambda: send_weights(engine, other))
    finally:
        engine.shutdown()
    return rows


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="mid", help="preset of the synthetic checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS / "host_memory.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    first = checkpoint_of(arguments.size)
    paths = first, ensure_checkpoint(first.with_name(f"{first.name}-other"), arguments.size, seed=1)
    share = open_checkpoint(first).num_bytes
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as programs:
            base = base_bytes(programs)
            rows = measure(paths, Watch(base=base, share=share), programs)
    finally:
        ray.shutdown()
    facts = {"machine": machine_facts(load_before), "size": arguments.size, "share_bytes": share, "base_bytes": base}
    save({**facts, "rows": rows}, arguments.out)
    print(table_of(rows))


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return the moments as Markdown: three numbers are before, the most, after."""
    headings = ["copies of the share", *Held._fields, "together, the most"]
    times = ("before", "most", "after")
    lines = [
        [name, *(", ".join(f"{row[at][kind]:.1f}" for at in times) for kind in Held._fields), f"{row['together']:.1f}"]
        for name, row in rows.items()
    ]
    return markdown_table(headings, lines)


if __name__ == "__main__":
    main()
