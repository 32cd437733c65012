"""Saved weights that Tinker's clients name by path: adapters below `weight_roots`, loaded when a path is first used."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rayserve_moe.checkpoints.adapters.config import CONFIG_FILE
from rayserve_moe.checkpoints.adapters.directory import holds
from rayserve_moe.config.given_files import Reach, is_url
from rayserve_moe.serving.api.schemas.control import LoadAdapterBody
from rayserve_moe.serving.api.schemas.tinker import SAVED
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.adapters import holds_beside, is_loaded, load_adapter
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.errors import ApiError

PARAM = "model_path"


@dataclass
class SavedWeights:
    """Adapters by path, each loaded once for all clients under its path as name."""

    state: ApiState
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an adapter is loaded."""

    async def load(self, model_path: str) -> None:
        """Load an adapter on all replicas unless it is loaded. A server without `max_loras` merges it.

        Raises: ApiError 404 if no root holds it, 400 if it is refused, 409 if it would be merged into other weights.
        """
        async with self._loading:
            if is_loaded(self.state, model_path):
                return
            directory = await asyncio.to_thread(self._directory_of, model_path)
            if directory is None:
                message = "no such weights: neither an adapter of this name is loaded, nor does weight_roots hold it"
                raise ApiError(404, message, param=PARAM, code="adapter_not_found")
            loaded = await load_adapter(Fleet(self.state), LoadAdapterBody(lora_name=model_path, lora_path=directory))
            if not loaded.outcome.success:
                raise ApiError(400, loaded.outcome.message, param=PARAM, code="weights_refused")

    async def keep(self, model_path: str) -> None:
        """Load the adapter of a sampler again if it was dropped.

        Raises: ApiError as `load`, and 404 on a server without `max_loras` that serves other weights by now.
        """
        if not holds_beside(self.state) and not is_loaded(self.state, model_path):
            message = "other weights serve now: without max_loras a server merges a single adapter"
            raise ApiError(404, message, param="sampling_session_id", code="adapter_not_found")
        await self.load(model_path)

    def _directory_of(self, model_path: str) -> str | None:
        """Return the directory of a path below the first root with an adapter there, or None."""
        roots = [root.rstrip("/") for root in self.state.weight_roots if not is_url(root)]
        reach = Reach(self.state.weight_roots)
        found = (f"{root}/{model_path.removeprefix(SAVED)}" for root in roots)
        return next((directory for directory in found if holds(directory, CONFIG_FILE, reach=reach)), None)
