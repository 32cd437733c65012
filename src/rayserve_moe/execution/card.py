"""Description of a model before its weights are read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rayserve_moe.checkpoints.files import CheckpointFiles, read_config
from rayserve_moe.checkpoints.model_path import located, model_name, with_small_files
from rayserve_moe.checkpoints.names import verify
from rayserve_moe.config.derive import max_model_len
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.config.replay_settings import ReplaySettings
from rayserve_moe.config.settings import ExpertSettings, ModelSettings, Settings, SettingsError
from rayserve_moe.execution.processor_module import digest_of, load_processors
from rayserve_moe.execution.served_model import RunnerSettings, runner_settings
from rayserve_moe.model.family_table import family_of, rules_of, spec_from_config
from rayserve_moe.model.layers.index_rows import index_layout
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.requests.records import GateScale, IndexLayout, ModelCard, PromptEvidence
from rayserve_moe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DescribedModel:
    """Card and tokenizer of a model, and the settings of its runners with the resolved checkpoint path."""

    card: ModelCard
    tokenizer: Tokenizer
    runner: RunnerSettings


def describe_model(settings: Settings) -> DescribedModel:
    """Read config and tokenizer of the checkpoint.

    A synthetic checkpoint is created if it does not exist. Of a remote checkpoint, these small files are copied.

    Raises: ValueError with the missing file or unsupported value.
    """
    kept = default_cache_directory()
    place = located(settings.model.path, cache_directory=kept)
    path = with_small_files(place, cache_directory=kept)
    # The config first: the tokenizer's loader also reads it, and reports unsupported model values as its own error.
    spec = spec_from_config(read_config(path))
    model, tokenizer = dataclasses.replace(settings.model, path=place), Tokenizer(path)
    card = model_card(
        spec,
        model=model,
        replay=settings.replay,
        experts=settings.experts,
        name=model_name(place),
        eos_token_ids=tokenizer.eos_token_ids,
    )
    speculation = settings.speculation
    if speculation.draft_model_path:
        draft = located(speculation.draft_model_path, cache_directory=kept)
        speculation = dataclasses.replace(speculation, draft_model_path=draft)
    settings = dataclasses.replace(settings, speculation=speculation)
    processors = load_processors(settings.structured.processors)
    card = dataclasses.replace(card, processors=tuple(each.arguments for each in processors))
    card = dataclasses.replace(card, max_constraint_bytes=settings.structured.max_bytes)
    runner = dataclasses.replace(runner_settings(settings, model), processors_digest=digest_of(processors))
    return DescribedModel(card, tokenizer, runner)


def model_card(
    spec: ModelSpec,
    *,
    model: ModelSettings,
    replay: ReplaySettings,
    name: str,
    eos_token_ids: tuple[int, ...],
    experts: ExpertSettings | None = None,
) -> ModelCard:
    """Describe a model under the settings of its server; `name` is the default for the served name."""
    return ModelCard(
        name=model.served_name or name,
        max_model_len=max_model_len(model, spec.max_position_embeddings),
        vocab_size=spec.vocab_size,
        eos_token_ids=eos_token_ids,
        routing=spec.routing_layout,
        returns_routing=replay.enabled,
        path=model.path,
        logprobs_mode=model.logprobs_mode,
        routing_by_default=replay.by_default,
        index=_index_of(spec, replay) if replay.shows_index else None,
        gates=_gates_of(spec) if replay.shows_gates else None,
        hidden_size=spec.hidden_size if replay.shows_hidden else 0,
        evidence=PromptEvidence(replay.audits, _state_layers(spec, replay), spec.hidden_size),
        takes_forced_routing=experts is None or experts.selection != "balanced",
    )


def _state_layers(spec: ModelSpec, replay: ReplaySettings) -> tuple[int, ...]:
    """Return the layers for layer states. Raises: SettingsError for layers that the model lacks."""
    layers = replay.state_layers
    if len(set(layers)) < len(layers) or max(layers, default=0) > spec.num_layers:
        raise SettingsError(f"hidden_state_layers must be different layers from 0 to {spec.num_layers}")
    return layers


def _index_of(spec: ModelSpec, replay: ReplaySettings) -> IndexLayout:
    """Return the layout of index rows. Raises: SettingsError for a model without an index."""
    if (layout := index_layout(spec)) is None:
        raise SettingsError(f"enable_return_indexer_topk: {spec.family} has no sparse attention with an index")
    return dataclasses.replace(layout, max_bytes=replay.index_store_mib << 20)


def _gates_of(spec: ModelSpec) -> GateScale:
    router = spec.router
    return GateScale(router.score, router.renormalize, router.scale, router.expert_factors)


def check_tensors(files: CheckpointFiles) -> None:
    """Check the tensors listed in a checkpoint's headers against its config, without reading any tensor.

    Raises: CheckpointError as in `names.verify`, UnsupportedModelError for the config.
    """
    spec, rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
    tree = parameters_in_files(parameter_specs(spec, dtype="float32"), rules, spec=spec)
    verify(files, tree, rules=rules, ignored=getattr(family_of(files.config), "IGNORED", ()))
