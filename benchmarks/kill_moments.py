"""Moments at which a signal comes, by name.

`prefill`: some stream has nothing yet, prompts are long. `decode`: every stream has something. `rebalance`: experts
are moving, on two emulated devices; for that a first signal comes before, after which experts go back to where they
were, and the outage is that of both. `staging`: hosts read other weights; an update that is refused is sent again.
`crossed`: after such an update, which requests cross. `any`: whenever.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.kill_asking import LIMIT_S, Asked, Fault
from benchmarks.serve_process import HOST

MOVING: dict[str, Any] = {
    "devices_per_host": 2,
    "data_parallel_size": 2,
    "expert_backend": "all_to_all",
    "num_redundant_experts": 2,
    "enable_eplb": True,
    "eplb_interval": 32,
    "eplb_window": 64,
    "eplb_slots_per_step": 1,
}
MOMENTS: dict[str, dict[str, Any]] = {
    "any": {},
    "prefill": {},
    "decode": {},
    "rebalance": MOVING,
    "staging": {},
    "crossed": {},
}
"""What a server needs for each moment, besides what it needs for all."""
WITH_UPDATES = ("staging", "crossed")
PROMPT_REPEATS = {"prefill": 120}
POLL_S = 0.005
AGAIN_S = 0.5


class Timing(NamedTuple):
    """Seconds of the undisturbed run: all of it, until every stream has got something, and of an update meanwhile."""

    run_s: float
    first_s: float
    update_s: float = 0.0


class Delivery:
    """Sends a signal by `kill` in one moment of the requests; `hit` says whether it was that moment.

    `update` has a path and the name of its weights, for the moments that have an update.
    """

    def __init__(self, kill: Callable[[], object], port: int, timing: Timing, *, update: tuple[Path, str]) -> None:
        self.hit = False
        self._kill, self._timing, self._update = kill, timing, update
        self._client = httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=LIMIT_S)

    def at(self, moment: str) -> Fault:
        """Return the fault that comes in a moment."""
        return getattr(self, f"_{moment}")

    async def _any(self, _: Asked) -> None:
        await asyncio.sleep(random.uniform(0, 0.8 * self._timing.run_s))
        self._send(True)

    async def _prefill(self, asked: Asked) -> None:
        await asyncio.sleep(random.uniform(0, self._timing.first_s))
        self._send(not asked.all_decode)

    async def _decode(self, asked: Asked) -> None:
        await _until(lambda: asked.all_decode)
        await asyncio.sleep(random.uniform(0, 0.8 * (self._timing.run_s - self._timing.first_s)))
        self._send(not asked.num_over)

    async def _rebalance(self, asked: Asked) -> None:
        await _until(lambda: asked.all_decode)
        self._kill()
        part = random.uniform(0, 0.5)  # what is known of it is a step old
        while not asked.num_over:
            progress = (await self._client.get("/experts/state")).raise_for_status().json()["progress"]
            if not progress["is_done"] and progress["layers_done"] >= part * progress["layers"]:
                return self._send(True)
            await asyncio.sleep(POLL_S)
        return None

    async def _staging(self, asked: Asked) -> None:
        await _until(lambda: asked.all_decode)
        update = asyncio.create_task(self._updated())
        await asyncio.sleep(random.uniform(0, self._timing.update_s))
        self._send(not update.done())
        while not await update:
            if asked.num_over:
                return
            await asyncio.sleep(AGAIN_S)
            update = asyncio.create_task(self._updated())

    async def _crossed(self, asked: Asked) -> None:
        await _until(lambda: asked.all_decode)
        if not await self._updated():
            raise RuntimeError("an undisturbed update was refused")
        await asyncio.sleep(random.uniform(0, 0.5 * self._timing.run_s))
        self._send(not asked.num_over)

    async def _updated(self) -> bool:
        return await updated(self._client, *self._update)

    def _send(self, hit: bool) -> None:
        self.hit = hit
        self._kill()


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait for the condition. TimeoutError after LIMIT_S."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def updated(client: httpx.AsyncClient, path: Path, version: str) -> bool:
    """Return True if all hosts took these weights; those that had served serve on otherwise."""
    body = {"model_path": str(path), "weight_version": version}
    return (await client.post("/update_weights_from_disk", json=body)).json().get("success", False)


def other_weights(path: Path, directory: Path) -> Path:
    """Return a copy of a checkpoint in which half of the values differ in the last bit that bf16 has."""
    copy = directory / "other"
    shutil.copytree(path, copy)
    generator = np.random.default_rng(0)
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        for values in tensors.values():
            bits = values.reshape(-1).view(f"u{values.itemsize}")
            bits ^= generator.integers(0, 2, bits.size).astype(bits.dtype) << (8 * values.itemsize - 16)
        file.unlink()
        save_file(tensors, file)
    return copy
