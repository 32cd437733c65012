"""Settings of speculation are understood as SGLang and vLLM write them, and refused by name where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import SettingsError, SpeculationSettings

NGRAM = {"speculative_algorithm": "NGRAM"}


def speculation(**values: Any) -> SpeculationSettings:
    return settings_from({"model_path": "m", **values}).speculation


@pytest.mark.parametrize("off", [{}, {"speculative_algorithm": None}, {"speculative_algorithm": "off"}])
def test_without_an_algorithm_nothing_is_drafted(off):
    assert speculation(**off, speculative_num_steps=5).max_drafts == 0


def test_drafts_are_counted_as_steps_or_as_rows():
    ngram = {"speculative_algorithm": "NGRAM"}
    assert speculation(**ngram).max_drafts == 7
    assert speculation(**ngram, speculative_num_steps=3).max_drafts == 3
    assert speculation(**ngram, speculative_num_draft_tokens=4).max_drafts == 3
    assert speculation(**ngram, speculative_num_steps=3, speculative_num_draft_tokens=4).max_drafts == 3


def test_settings_of_vllm_are_those_of_sglang():
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 3}
    expected = SpeculationSettings("NGRAM", num_steps=5, min_match=3, max_match=4)
    assert speculation(speculative_config=given) == expected
    assert speculation(speculative_config=None) == SpeculationSettings()


@pytest.mark.parametrize(
    ("method", "algorithm"), [("eagle", "EAGLE"), ("eagle3", "EAGLE3"), ("mtp", "NEXTN"), ("deepseek_mtp", "NEXTN")]
)
def test_draft_models_of_vllm_are_those_of_sglang(method, algorithm):
    given = {"method": method, "model": "a/head", "num_speculative_tokens": 3}
    expected = SpeculationSettings(algorithm, draft_model_path="a/head", num_steps=3)
    assert speculation(speculative_config=given) == expected
    named = {"speculative_algorithm": algorithm.lower(), "speculative_draft_model_path": "a/head"}
    assert speculation(**named, speculative_num_steps=3, speculative_eagle_topk=1) == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "EAGLE3 needs speculative_draft_model_path"),
        ({"speculative_algorithm": "nextn", "speculative_eagle_topk": 4}, "trees of drafts are not served, chains are"),
        ({"speculative_eagle_topk": 9}, "speculative_eagle_topk must be 1 or left out, found 9"),
        ({**NGRAM, "speculative_num_draft_tokens": 9}, "speculative_num_draft_tokens must be at most 8"),
        ({"speculative_algorithm": "dflash"}, "DFLASH takes a draft model of a kind that is not served"),
        ({**NGRAM, "speculative_draft_model_path": "h"}, "is not for speculative_algorithm NGRAM"),
        ({"speculative_algorithm": "MAGIC"}, "must be one of off, NGRAM, SIBLINGS"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 8}, "speculative_num_steps must be at most 7"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1}, "speculative_num_draft_tokens"),
        ({**NGRAM, "speculative_num_steps": 3, "speculative_num_draft_tokens": 5}, "speculative_num_steps \\+ 1 = 4"),
        ({**NGRAM, "speculative_ngram_min_match_window_size": 9}, "speculative_ngram_min_match_window_size 9 exceeds"),
        ({"speculative_config": "ngram"}, "speculative_config must be a mapping"),
        ({"speculative_config": {"method": "medusa"}}, "method must be one of ngram, eagle"),
        ({"speculative_config": {"method": ["mtp"]}}, "method must be one of ngram, eagle"),
        ({"speculative_config": {"method": "ngram", "k": 3}}, "unknown key 'k'"),
        ({"speculative_config": {"method": "ngram"}, "speculative_algorithm": "NGRAM"}, "are one setting"),
        ({"speculative_algorithm": "NGRAM", "expert_selection": "balanced"}, "exclude each other"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values, named):
    with pytest.raises(SettingsError, match=named):
        speculation(**values)
