"""Settings of speculative decoding in the forms that other engines take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.config.settings import DRAFT_MODELS, SettingsError, SpeculationSettings

ALGORITHM, NUM_STEPS = "speculative_algorithm", "speculative_num_steps"
NOT_SERVED = ("STANDALONE", "DFLASH", "DSPARK", "UNO")
"""Algorithms of SGLang that take other draft models."""
VLLM = "speculative_config"
METHODS_OF_VLLM = {"ngram": "NGRAM", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}
"""SGLang's algorithm by vLLM's method. Methods that end in `_mtp`, with the family of the target ahead, mean `mtp`."""
KEYS_OF_VLLM = {
    "model": "speculative_draft_model_path",
    "num_speculative_tokens": NUM_STEPS,
    "prompt_lookup_max": "speculative_ngram_max_match_window_size",
    "prompt_lookup_min": "speculative_ngram_min_match_window_size",
}


def in_own_terms(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings with null for `off`, and vLLM's `speculative_config` under SGLang's names.

    Raises: SettingsError for an unsupported method or key, and for a setting under two names.
    """
    flat = dict(values)
    given = flat.pop(VLLM, None)
    if given is not None:
        translated = _from_vllm(given)
        if twice := sorted(flat.keys() & translated.keys()):
            raise SettingsError(f"{VLLM} and {twice[0]} are one setting: give it once")
        flat |= translated
    if ALGORITHM in flat:
        flat[ALGORITHM] = _algorithm(flat[ALGORITHM])
    return flat


def check_speculation(settings: SpeculationSettings, *, selection: str) -> None:
    """Raise SettingsError if settings of speculation contradict each other or the selection of experts."""
    steps, tokens = settings.num_steps, settings.num_draft_tokens
    if settings.algorithm == "off":
        return
    if settings.algorithm in ("EAGLE", "EAGLE3") and not settings.draft_model_path:
        raise SettingsError(f"speculative_algorithm {settings.algorithm} needs speculative_draft_model_path")
    if settings.draft_model_path and settings.algorithm not in DRAFT_MODELS:
        raise SettingsError(f"speculative_draft_model_path is not for speculative_algorithm {settings.algorithm}")
    if tokens == 1:
        raise SettingsError("speculative_num_draft_tokens counts the token before the drafts too: 2 or more, or 0")
    if steps and tokens and tokens != steps + 1:
        raise SettingsError(
            f"speculative_num_draft_tokens {tokens} must be speculative_num_steps + 1 = {steps + 1}: drafts are a chain"
        )
    if settings.min_match > settings.max_match:
        raise SettingsError(
            f"speculative_ngram_min_match_window_size {settings.min_match} exceeds "
            f"speculative_ngram_max_match_window_size {settings.max_match}"
        )
    if selection == "balanced":
        raise SettingsError(
            "speculative_algorithm and expert_selection balanced exclude each other: which experts a token gets then "
            "depends on the other tokens of its step, drafts among them, so that drafts would change what is returned"
        )


def _algorithm(given: Any) -> Any:
    """Return the algorithm under its own name."""
    if given is None:
        return "off"
    named = given.upper() if isinstance(given, str) else given
    if named in NOT_SERVED:
        raise SettingsError(
            f"{ALGORITHM} {named} takes a draft model of a kind that is not served: take EAGLE3, NEXTN or NGRAM"
        )
    return named if named in ("NGRAM", "SIBLINGS", *DRAFT_MODELS) else given


def _from_vllm(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SettingsError(f"{VLLM} must be a mapping, such as {{method: ngram, num_speculative_tokens: 5}}")
    rest = dict(given)
    method = rest.pop("method", None)
    algorithm = METHODS_OF_VLLM.get("mtp" if str(method).endswith("_mtp") else str(method))
    if algorithm is None:
        raise SettingsError(f"{VLLM}: method must be one of {', '.join(METHODS_OF_VLLM)}, found {method!r}"[:200])
    unknown = sorted(map(str, rest.keys() - KEYS_OF_VLLM.keys()))
    if unknown:
        raise SettingsError(f"{VLLM}: unknown key {unknown[0]!r}; known: method, {', '.join(KEYS_OF_VLLM)}"[:300])
    return {ALGORITHM: algorithm, **{KEYS_OF_VLLM[key]: value for key, value in rest.items()}}
