"""The work of a step, without compiling it: what kernels and the roofline of an estimate start from."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.tools.estimate.chips import chip_of
from rayserve_moe.tools.estimate.step_work import AttentionWork, RecurrentWork, SparseWork, StepWork
from rayserve_moe.tools.estimate.workload import StepSizes, devices_of_token, fullest_slots, step_work
from rayserve_moe.tools.served_cases import case_of_model, lay_out

LAYERS, KV_BYTES = 48, 2 * 4 * 128 * 2
"""Of Qwen3-30B-A3B: layers, and what they keep of a token."""
WINDOWS = (1024, 127)
"""Positions that a query of gpt-oss sees before its own, in layers without and with a window."""


@cache
def served(batch: int, *, tp: int = 1, redundant: int = 0, drafts: str = "", kv_dtype: str = "bfloat16") -> ServedModel:
    values = {"max_model_len": 1024, "max_running_requests": batch, "num_redundant_experts": redundant}
    values |= {"speculative_algorithm": drafts} if drafts else {}
    values |= {"kv_cache_dtype": "fp8"} if kv_dtype != "bfloat16" else {}
    return lay_out(case_of_model("qwen3-30b-a3b", "v6e:2x4", tp=tp, values=values))


def work(batch: int, *, prompt_tokens: int = 0, kv_dtype: str = "bfloat16", **how: int | str) -> StepWork:
    sizes = StepSizes("v6e:2x4", batch, 1024, kv_dtype=kv_dtype)
    return step_work(served(batch, kv_dtype=kv_dtype, **how).config, sizes, prompt_tokens=prompt_tokens)


def blocks_of(found: StepWork) -> dict[int, AttentionWork]:
    """The work of attention by blocks of queries; all layers have the same heads."""
    assert len({sizes[1:] for sizes in found.attention}) == 1
    return {sizes.num_blocks: work for sizes, work in found.attention.items()}


def test_few_tokens_use_few_slots_and_many_use_all():
    assert 16 * (1 - (1 - 8 / 128) ** 16) < work(2).used_slots < 16, "more than on the mean device"
    assert work(128).used_slots == pytest.approx(16)
    assert work(128, redundant=32).used_slots == pytest.approx(20)
    assert work(128).expert_rows == 128 * 8


def test_a_full_step_reads_all_weights_but_the_table_and_all_keys():
    found = served(128)
    table = 19_072 * 2048 * 2  # 151,936 rows over 8 devices, in whole lanes
    kv_bytes = 128 * 1024 * KV_BYTES * LAYERS
    assert work(128).hbm_bytes == pytest.approx(bytes_on_device(found.weights) - table + kv_bytes)


def test_decode_of_16_sequences_takes_five_milliseconds_of_memory():
    """4.16 on the mean device; the fullest has 2.6 more experts of 9.4 MB to read in each layer."""
    seconds = work(2).hbm_bytes / chip_of("v6e").device_hbm_bytes
    assert seconds == pytest.approx(4.16e-3 + 48 * 2.6 * 9.44e6 / 1638e9, rel=0.01)


def test_operations_grow_with_tokens():
    few, many = work(2), work(128)
    assert many.flops == pytest.approx(64 * few.flops)
    prefill = work(16, prompt_tokens=8192)
    active = 2 * 3.0e9 * (8192 + 16)
    assert 0.8 * active < prefill.flops < 1.5 * active


def test_kernels_visit_blocks_of_keys():
    """Those of 8 bits have half the bytes."""
    for kv_dtype, kv_bytes in (("bfloat16", KV_BYTES), ("float8_e4m3fn", KV_BYTES // 2)):
        (own,) = work(2, kv_dtype=kv_dtype).attention.values()
        assert (own.num_query_blocks, own.kv_bytes, own.num_visits, own.num_pages) == (
            2,
            2 * 1024 * kv_bytes,
            2 * 2,
            2 * 8,
        )
        assert blocks_of(work(16, prompt_tokens=8192, kv_dtype=kv_dtype)).keys() == {16, 8192 // 32}


def test_drafts_are_verified_by_reading_pages_once():
    """Of 2 sequences of 4 rows each: weights and operations are those of 8 tokens, pages those of 2 sequences."""
    verify = step_work(served(2, drafts="NGRAM").config, StepSizes("v6e:2x4", 2, 1024, singles=8, rows_each=4))
    (found,) = verify.attention.values()
    assert blocks_of(verify).keys() == {8} and found == blocks_of(work(2))[2]
    assert verify.used_slots == work(8).used_slots and verify.flops == pytest.approx(work(8).flops)
    assert work(8).hbm_bytes - verify.hbm_bytes == pytest.approx(6 * 1024 * KV_BYTES * LAYERS)
    eight_bits = served(2, drafts="NGRAM", kv_dtype="float8_e4m3fn").config
    (again,) = step_work(
        eight_bits, StepSizes("v6e:2x4", 2, 1024, rows_each=4, kv_dtype="float8_e4m3fn")
    ).attention.values()
    assert again.num_query_blocks == 2 and again.kv_bytes == 2 * 1024 * KV_BYTES // 2


def test_latents_are_read_with_what_fills_their_registers():
    values = {"max_model_len": 1024, "max_running_requests": 2}
    model = lay_out(case_of_model("glm-4.7-flash", "v6e:2x4", values=values)).config
    (decode,) = step_work(model, StepSizes("v6e:2x4", 2, 1024)).attention.values()
    assert decode.kv_bytes == 2 * 1024 * 640 * 2 and decode.num_pages == 2 * 8 and decode.num_visits == 2 * 2


def test_beyond_a_choice_an_index_is_read_and_the_chosen_rows_alone():
    """Keys of 128 of every position, latents of the 2,048 chosen ones; dense attention has nothing to read."""
    values = {"max_model_len": 8192, "max_running_requests": 2}
    model = lay_out(case_of_model("deepseek-v3.2", "v5p:2x4x4", tp=4, values=values)).config
    short, long = (step_work(model, StepSizes("v5p:2x4x4", 2, context)) for context in (2048, 8192))
    assert (short.sparse, long.sparse) == (SparseWork(0, 2048, 2048), SparseWork(2, 8192, 2048, 1))
    assert long.hbm_bytes - short.hbm_bytes == pytest.approx(61 * 8192 * 128 * 2), "a device scores half of the tokens"
    assert long.flops - short.flops == pytest.approx(2 * 61 * 8192 * 64 * 128)
    (dense,), (nothing,) = (found.attention.values() for found in (short, long))
    assert dense.kv_bytes == 2 * 2048 * 640 * 2 and (nothing.num_visits, nothing.kv_bytes) == (0, 0)


def test_a_part_of_a_prompt_sees_what_earlier_steps_computed():
    """A device attends 32 blocks of 32 heads to blocks of 512 keys, and chooses for 8 of the blocks."""
    values = {"max_model_len": 8192, "max_running_requests": 2}
    model = lay_out(case_of_model("deepseek-v3.2", "v5p:2x4x4", tp=4, values=values)).config
    first, last = (
        step_work(model, StepSizes("v5p:2x4x4", 2, 8192, prompt_start=start), prompt_tokens=1024) for start in (0, 7168)
    )
    assert (first.sparse, last.sparse) == (
        SparseWork(2, 8192, 2048, 1),
        SparseWork(2, 8192, 2048, 1, index_blocks=8, prompt_context=7168 + 512),
    )
    (of_first,), (of_last,) = (
        [one for one in found.attention.values() if one.is_of_prompts] for found in (first, last)
    )
    assert (of_first.num_visits, of_last.num_visits) == (16 * 1 + 16 * 2, 16 * 15 + 16 * 16)
    seen, of_index = 2 * 32 * (576 + 512) * 61 * 1024, 2 * 61 * 64 * 128 * 8 * 32
    assert last.flops - first.flops == pytest.approx(seen * (2048 - 512) + of_index * (7168 + 512))


def test_cores_that_share_a_device_share_blocks_of_an_attention_of_our_own():
    """Single tokens, of which there is an odd number, and prompts in blocks of 32, which see half of theirs."""
    values = {"max_model_len": 1024, "max_running_requests": 3}
    model = lay_out(case_of_model("qwen3-30b-a3b", "v5p:2x2x1", values=values)).config
    found = blocks_of(step_work(model, StepSizes("v5p:2x2x1", 3, 1024), prompt_tokens=2048))
    assert set(found) == {4, 2048 // 32}
    assert found[4].num_visits == 3 * 2 and found[4].num_pages == 3 * 8
    prompt = found[2048 // 32]
    assert prompt.num_visits == 2 * (16 * 1 + 16 * 2), "512 keys a block"
    assert prompt.kv_bytes == prompt.num_pages * 128 * KV_BYTES


def test_layers_with_windows_read_them_alone():
    """Every second layer of gpt-oss sees 128 tokens, a page."""
    values, kv_bytes = {"max_model_len": 1024, "max_running_requests": 2}, 2 * 8 * 64 * 2
    model = lay_out(case_of_model("gpt-oss-20b", "v6e:2x4", values=values)).config
    spec = replace(model.spec, layers=tuple(replace(layer, window=0) for layer in model.spec.layers))
    windowed, full = (step_work(each, StepSizes("v6e:2x4", 2, 1024)) for each in (model, replace(model, spec=spec)))
    assert full.hbm_bytes - windowed.hbm_bytes == 12 * 2 * (1024 - 128) * kv_bytes
    assert full.flops - windowed.flops == 12 * 2 * (1024 - 128) * 2 * 64 * 2 * 64
    (own,), (of_full,) = (each.attention.values() for each in (windowed, full))
    assert (own.num_pages, of_full.num_pages) == ((2 * 8 + 2 * 1) / 2, 2 * 8), "the mean of both kinds of layer"
    assert own.kv_bytes == own.num_pages * 128 * kv_bytes
    of_prompts = blocks_of(step_work(model, StepSizes("v6e:2x4", 2, 1024), prompt_tokens=2048))[2048 // 32]
    pages = [
        sum(math.ceil(end / 128) - max(0, end - 32 - past) // 128 for end in range(32, 1025, 32)) for past in WINDOWS
    ]
    assert of_prompts.num_pages == 2 * sum(pages) / 2


def test_kinds_of_attention_are_counted_by_their_heads():
    """Gemma 4: 25 layers of 8 KV heads of 256 that see 1024 tokens, and 5 of 2 KV heads of 512."""
    values = {"max_model_len": 4096, "max_running_requests": 2}
    model = lay_out(case_of_model("gemma-4-26b-a4b", "v6e:2x2", values=values)).config
    found = step_work(model, StepSizes("v6e:2x2", 2, 4096)).attention
    assert {sizes[1:]: work.num_pages for sizes, work in found.items()} == {(8, 256): 2 * 8, (2, 512): 2 * 32}


def test_devices_that_share_heads_read_less():
    assert work(8, tp=4).hbm_bytes < work(8).hbm_bytes


def test_rows_of_a_hybrid_model_read_rings_to_their_cursors_and_fold_once_in_64_tokens():
    """A cursor anywhere from 1 to 63 is read in tiles of 8, a ring that is folded as a whole."""
    values = {"max_model_len": 1024, "max_running_requests": 8}
    model = lay_out(case_of_model("qwen3.5-35b-a3b", "v6e:2x4", values=values, num_layers=4)).config
    assert work(8).recurrent is None
    decode = step_work(model, StepSizes("v6e:2x4", 8, 1024)).recurrent
    assert decode == RecurrentWork(num_singles=8, num_blocks=0, num_visits=8, ring_tokens=36, num_folds=8 / 64)
    drafts = step_work(model, StepSizes("v6e:2x4", 8, 1024, rows_each=4)).recurrent
    assert drafts == replace(decode, num_singles=32, num_folds=32 / 64)
    prompts = step_work(model, StepSizes("v6e:2x4", 8, 1024), prompt_tokens=2048).recurrent
    assert prompts == RecurrentWork(8, 256, 8 + 2, 36 * 8 / 10, (8 + 2048) / 64), "rings of two prompts are empty"


def test_the_fullest_device_is_that_of_random_routing():
    """16 tokens choose 8 of 128 experts on 8 devices; the estimate takes slots as independent."""
    rng, runs, tokens = np.random.default_rng(0), 2000, 16
    chosen = rng.random((runs, tokens, 128)).argpartition(8, axis=2)[:, :, :8]
    used = np.zeros((runs, 128), bool)
    np.put_along_axis(used, chosen.reshape(runs, -1), values=True, axis=1)
    fullest = used.reshape(runs, 8, 16).sum(axis=2).max(axis=1).mean()
    assert fullest_slots(16, 8, share=8 / 128, num_tokens=tokens) == pytest.approx(fullest, rel=0.02)
    hosts = (chosen // 16)[:, 0]
    devices = np.mean([len(set(row)) for row in hosts.tolist()])
    assert devices_of_token(128, 8, top_k=8) == pytest.approx(devices, rel=0.02)


def test_one_device_has_the_mean_and_one_expert_has_one_device():
    assert fullest_slots(16, 1, share=0.25, num_tokens=3) == pytest.approx(16 * (1 - 0.75**3))
    assert devices_of_token(64, 8, top_k=1) == pytest.approx(1.0)
    assert devices_of_token(8, 1, top_k=2) == pytest.approx(1.0)


def test_the_links_carry_a_row_per_token_and_device_and_one_back():
    moved = 2 * 16 * devices_of_token(128, 8, top_k=8) * 2048 * 2 * 48
    assert work(16).exchanged_bytes == pytest.approx(moved)
