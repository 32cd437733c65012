"""Mixture-of-Experts language models served with JAX on Ray, with routing that trainers can replay.

Public names load on first use, so that importing one plain package loads neither jax nor ray.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

__version__ = "0.1.0"

# transformers says that PyTorch is missing when it is imported. Nothing here needs PyTorch.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

_HOME_OF = {
    "CompletionOutput": "rayserve_moe.inprocess.llm",
    "Engine": "rayserve_moe.inprocess.engine",
    "LLM": "rayserve_moe.inprocess.llm",
    "RequestOutput": "rayserve_moe.inprocess.llm",
    "SamplingParams": "rayserve_moe.inprocess.arguments",
    "extract_indexer_topk_from_meta_info": "rayserve_moe.replay.encoding",
    "extract_router_gates_from_meta_info": "rayserve_moe.replay.encoding",
    "extract_routed_experts_from_meta_info": "rayserve_moe.replay.encoding",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "extract_indexer_topk_from_meta_info",
    "extract_routed_experts_from_meta_info",
    "extract_router_gates_from_meta_info",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
