"""What the layers above the engine are told about a model."""

from __future__ import annotations

from rayserve_moe.config.derive import max_model_len
from rayserve_moe.config.settings import ExpertSettings, ModelSettings, ReplaySettings
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.requests import ModelCard


def model_card(
    spec: ModelSpec,
    *,
    model: ModelSettings,
    replay: ReplaySettings,
    name: str,
    eos_token_ids: tuple[int, ...],
    experts: ExpertSettings | None = None,
) -> ModelCard:
    """Describe a model under the settings it is served with; `name` stands in where none was given."""
    return ModelCard(
        name=model.served_name or name,
        max_model_len=max_model_len(model, spec.max_position_embeddings),
        vocab_size=spec.vocab_size,
        eos_token_ids=eos_token_ids,
        routing=spec.routing_layout,
        returns_routing=replay.enabled,
        path=model.path,
        takes_forced_routing=experts is None or experts.selection != "balanced",
    )
