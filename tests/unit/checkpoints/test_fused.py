"""Tensors that hold several parameters, or all experts, load as those that hold one each."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import CheckpointError, CheckpointFiles, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters, read_region
from rayserve_moe.checkpoints.names import tensor_places, verify
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.config.given_files import GivenFile
from rayserve_moe.model.families import qwen3_moe
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.param_spec import FileForm, ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from tests.support.checkpoints.fused_experts import FUSED_RULES, LAYOUTS, fused

MESH = jax.make_mesh((2, 2), ("rows", "columns"), devices=jax.devices()[:4])
SLOTS = np.array([[2, 0, 3, 1, 2, 2, 0, 1], [0, 1, 2, 3, 1, 1, 1, 1]])
"""For two MoE layers of four experts, over four devices."""

SHARDINGS = {
    "whole": PartitionSpec(),
    "experts": PartitionSpec(None, ("rows", "columns")),
    "experts and outputs": PartitionSpec(None, "columns", None, "rows"),
    "inputs and outputs": PartitionSpec(None, None, "columns", "rows"),
}


def _tree(files: CheckpointFiles, layout: str = "per_expert", **sizes: int):
    spec = qwen3_moe.spec_from_hf(files.config)
    return parameter_specs(replace(spec, experts=replace(spec.experts, layout=layout)), dtype="float32", **sizes)


def _experts(path: Path, layout: str, split: PartitionSpec, slots: np.ndarray | None = None) -> dict[str, jax.Array]:
    files, rules = open_checkpoint(path), CHECKPOINT_RULES if layout == "per_expert" else FUSED_RULES

    def sharding_of(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(MESH, split if spec.num_experts else PartitionSpec())

    tree = _tree(files, layout, num_redundant=0 if slots is None else 4)
    return load_parameters(WeightSource(files, rules, slots), tree, sharding_of=sharding_of)["experts"]


@pytest.fixture(scope="session", params=LAYOUTS)
def fused_one(request, tmp_path_factory, single) -> tuple[Path, str]:
    return fused(single, tmp_path_factory.mktemp(request.param) / "model", request.param), request.param


@pytest.mark.parametrize("split", SHARDINGS)
@pytest.mark.parametrize("slots", [None, SLOTS], ids=["in order", "placed"])
def test_fused_experts_load_as_one_tensor_per_expert(single, fused_one, split, slots):
    plain = _experts(single, "per_expert", SHARDINGS[split], slots)
    held = _experts(*fused_one, SHARDINGS[split], slots)
    for name, array in plain.items():
        np.testing.assert_array_equal(np.asarray(held[name]), np.asarray(array))
        assert held[name].sharding == array.sharding


def test_of_a_fused_tensor_only_the_asked_expert_is_read(single, fused_one, monkeypatch):
    """A half of it where gate and up lie in halves; both where they lie in turns."""
    num_read = 0
    read_into = GivenFile.read_into

    def counting(given: GivenFile, buffer: memoryview, offset: int) -> None:
        nonlocal num_read
        num_read += len(buffer)
        read_into(given, buffer, offset)

    path, layout = fused_one
    files = open_checkpoint(path)
    spec = _tree(files, layout)["experts"]["up_MPDF"]
    monkeypatch.setattr(GivenFile, "read_into", counting)
    region = ((1, 2), (2, 3), *((0, size) for size in spec.piece_shape))
    part = read_region(WeightSource(files, FUSED_RULES), spec, region=region)
    assert num_read == part.nbytes * (1 if layout == "fused_out_in" else 2)
    expert = load_file(single / "model.safetensors")["model.layers.2.mlp.experts.2.up_proj.weight"]
    np.testing.assert_array_equal(part[0, 0], expert.T)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", ["experts", "experts and outputs"])
def test_a_host_holds_its_share_and_a_piece_while_loading(tmp_path, config, layout, split):
    """Also where experts have replicas: never the tensor of all experts of a layer beside that."""
    wide = replace(config, hidden_size=128, moe_intermediate_size=128, num_experts=16)
    plain = write_checkpoint(tmp_path / "plain", wide, dtype="float32")
    files = open_checkpoint(fused(plain, tmp_path / "fused", layout))
    tree = _tree(files, layout, num_redundant=4)
    slots = np.stack([np.arange(20) % 16] * 2)

    def sharding_of(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(MESH, SHARDINGS[split] if spec.num_experts else PartitionSpec())

    tracemalloc.start()
    held = load_parameters(WeightSource(files, FUSED_RULES, slots), tree, sharding_of=sharding_of, in_host_memory=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    share = sum(values.nbytes for staged in jax.tree.leaves(held) for values, _ in staged.shards)
    of_all_experts = files.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert share < peak < 1.2 * share + (of_all_experts.end - of_all_experts.begin) / 16


ROWS = np.arange(14 * 3, dtype=np.float32).reshape(14, 3)


def _cut(num_held: int, **place: int | bool) -> ParamSpec:
    file = FileForm(transposed=True, **place)  # ty: ignore
    return ParamSpec((3, num_held), "float32", (None, None), "cut", file=file)


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (_cut(6, repeat_width=2, num_columns=14), [0, 1, 2, 3, 4, 5]),
        (_cut(8, repeat_width=2, repeats=2, start=6, num_columns=14), [6, 7, 6, 7, 8, 9, 8, 9]),
        (_cut(8, repeat_width=4, period=7), [0, 1, 2, 3, 7, 8, 9, 10]),
        (_cut(6, repeat_width=3, period=7, start=4), [4, 5, 6, 11, 12, 13]),
        (_cut(7, period=2, start=1), [1, 3, 5, 7, 9, 11, 13]),
    ],
)
def test_columns_of_a_tensor_are_held_by_period_and_start(tmp_path, single, spec, rows):
    """Rows of a fused q, k, v, with and without repeated heads; a head's keys, then values; every other one."""
    source = _with_tensors(tmp_path, single, {"cut": ROWS}, {"cut": "cut"})
    assert spec.file_shape == ROWS.shape
    wanted = ROWS[rows].T
    np.testing.assert_array_equal(read_region(source, spec, region=((0, 3), (0, len(rows)))), wanted)
    for first in range(len(rows)):
        part = read_region(source, spec, region=((1, 3), (first, len(rows))))
        np.testing.assert_array_equal(part, wanted[1:, first:])


def test_a_vector_may_lie_in_a_row(tmp_path, single):
    spec = ParamSpec((2, 4), "float32", ("layers", None), "bias", (0, 3), file=FileForm(is_row=True))
    rows = {f"bias.{layer}": np.arange(4, dtype=np.float32)[None] + layer for layer in spec.layers}
    source = _with_tensors(tmp_path, single, rows, {"bias": "bias.{layer}"})
    held = read_region(source, spec, region=((0, 2), (1, 4)))
    np.testing.assert_array_equal(held, [[1, 2, 3], [4, 5, 6]])


def test_a_bias_of_all_experts_is_cut_by_expert_and_in_turns(tmp_path, single):
    both = np.arange(3 * 8, dtype=np.float32).reshape(3, 8)
    source = _with_tensors(tmp_path, single, {"bias.0": both}, {"bias": "bias.{layer}"})
    source = replace(source, expert_of_slot=np.array([[2, 0, 1, 2]]))
    axes = ("layers", "expert_slots", None)
    file = FileForm(period=2, start=1, has_all_experts=True)
    spec = ParamSpec((1, 4, 4), "float32", axes, "bias", (0,), 3, file=file)
    held = read_region(source, spec, region=((0, 1), (0, 3), (1, 4)))
    np.testing.assert_array_equal(held[0], both[[2, 0, 1], 3::2])


def _with_tensors(directory: Path, single: Path, tensors: dict[str, np.ndarray], rules: dict[str, str]) -> WeightSource:
    copy = directory / "model"
    copy.mkdir()
    (copy / "config.json").write_bytes((single / "config.json").read_bytes())
    save_file(tensors, copy / "model.safetensors")
    return WeightSource(open_checkpoint(copy), rules)


def test_a_tensor_fills_all_parameters_that_are_cut_out_of_it(fused_one):
    path, layout = fused_one
    files = open_checkpoint(path)
    places = tensor_places(_tree(files, layout), FUSED_RULES)
    assert set(places) == set(files.tensors)
    of_tensor = places["model.layers.2.mlp.experts.gate_up_proj"]
    assert [(place.path[1], place.stack_index) for place in of_tensor] == [("gate_MPDF", (1,)), ("up_MPDF", (1,))]


@pytest.mark.parametrize(("starts", "message"), [((0, 2), "two parameters claim"), ((0,), "holds all of")])
def test_every_column_belongs_to_one_parameter(starts, message):
    tree = {str(start): _cut(4, start=start, num_columns=8) for start in starts}
    with pytest.raises(AssertionError, match=message):
        tensor_places(tree, {"cut": "cut"})


def test_a_fused_misfit_is_named_once(tmp_path, fused_one):
    path, layout = fused_one
    both, down = (f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
    tensors = load_file(path / "model.safetensors")
    tensors[both] = tensors[both][:3]
    del tensors[down]
    copy = tmp_path / "model"
    copy.mkdir()
    (copy / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, copy / "model.safetensors")
    shape = "[4, 16, 16]"
    with pytest.raises(CheckpointError) as refusal:
        verify(open_checkpoint(copy), _tree(open_checkpoint(copy), layout), rules=FUSED_RULES)
    assert f"1 tensor missing: {down}" in str(refusal.value)
    assert f"1 tensor misshapen: {both} in model.safetensors is [3, 16, 16], expected {shape}" in str(refusal.value)


def test_layers_for_further_tokens_and_what_a_family_ignores_are_passed_over(tmp_path, single):
    plain = load_file(single / "model.safetensors")
    norm = "model.layers.{}.input_layernorm.weight"
    extra = {norm.format(3): plain[norm.format(0)], "mtp.fc.weight": np.zeros((2, 2), np.float32)}
    source = _with_tensors(tmp_path, single, {**plain, **extra}, CHECKPOINT_RULES)
    tree = _tree(source.files)
    with pytest.raises(CheckpointError, match="2 tensors unexpected"):
        verify(source.files, tree, rules=CHECKPOINT_RULES)
    with pytest.raises(CheckpointError, match=r"1 tensor unexpected: model\.layers\.3\."):
        verify(source.files, tree, rules=CHECKPOINT_RULES, ignored=("mtp.*",))
    extra |= {"model.layers.3.eh_proj.weight": np.zeros((16, 32), np.float32)}
    save_file({**plain, **extra}, source.files.directory / "model.safetensors")
    verify(open_checkpoint(source.files.directory), tree, rules=CHECKPOINT_RULES, ignored=("mtp.*",))
