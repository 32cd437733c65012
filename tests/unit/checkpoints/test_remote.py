"""A checkpoint behind a URL loads like a local one: the same values, its own share of bytes, and one line per fault."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.range_server import RangeServer
from rayserve_moe.checkpoints import pieces, remote, transfer
from rayserve_moe.checkpoints.files import CheckpointError, CheckpointFiles, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.checkpoints.model_path import SMALL_FILES, located, model_name, with_small_files
from rayserve_moe.config.given_files import Reach
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.text.rank_files import RANK_FILES
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.tools import presets
from tests.support.text.rank_files import HUNYUAN, KIMI, tekken_content, write_tekken, write_tiktoken

MESH = jax.make_mesh((4,), ("devices",), devices=jax.devices()[:4])


@pytest.fixture(autouse=True)
def _waits_are_short_and_no_disk_is_full(monkeypatch):
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("rayserve_moe.checkpoints.range_cache.FREE_SHARE", 0.0)


@pytest.fixture
def server(indexed: Path) -> Iterator[RangeServer]:
    with RangeServer(indexed.parent) as running:
        yield running


@pytest.fixture
def in_memory(indexed: Path) -> Iterator[str]:
    """The checkpoint in fsspec's own object store."""
    system = fsspec.filesystem("memory")
    for file in indexed.iterdir():
        system.pipe_file(f"/bucket/model/{file.name}", file.read_bytes())
    yield "memory://bucket/model"
    system.rm("/bucket", recursive=True)


def loaded(files: CheckpointFiles, *, dtype: str = "float32", by: str | None = "experts", num_devices: int = 4) -> dict:
    """All parameters, experts over the first devices (`by` experts), or everything by its last dimension."""
    tree = parameter_specs(spec_from_config(files.config), dtype=dtype)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("devices",))

    def sharding_of(spec: ParamSpec) -> NamedSharding:
        if by == "columns" and spec.shape[-1] % num_devices == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * (len(spec.shape) - 1), "devices"))
        if by == "experts" and spec.num_experts:
            return NamedSharding(mesh, PartitionSpec(None, "devices"))
        return NamedSharding(mesh, PartitionSpec())

    return load_parameters(WeightSource(files, CHECKPOINT_RULES), tree, sharding_of=sharding_of)


def assert_alike(found: dict, wanted: dict) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), found, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part_bytes", [remote.RANGE_BYTES, 200])
@pytest.mark.parametrize("by", ["experts", "columns"])
def test_what_is_loaded_from_a_url_is_what_is_loaded_from_a_directory(server, indexed, by, part_bytes, monkeypatch):
    """Also where a range of bytes is shorter than a row of a tensor."""
    monkeypatch.setattr(remote, "RANGE_BYTES", part_bytes)
    wanted = loaded(open_checkpoint(indexed), by=by)
    assert_alike(loaded(open_checkpoint(f"{server.url}/model"), by=by), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_object_store_serves_the_same(in_memory, indexed, dtype):
    assert_alike(loaded(open_checkpoint(in_memory), dtype=dtype), loaded(open_checkpoint(indexed), dtype=dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("by", ["experts", "columns", None])
def test_no_byte_of_a_tensor_is_read_twice(server, by):
    """Nor those of whole rows that several devices of the host hold the columns of."""
    files = open_checkpoint(f"{server.url}/model")
    before = server.sent.tensor_bytes()
    loaded(files, by=by)
    assert server.sent.tensor_bytes() - before == files.num_bytes


def test_a_host_reads_its_share_of_the_bytes(indexed):
    """Two hosts, each with half of the experts: what is replicated is read by both, every expert by one."""
    total, experts = 0, 0
    for host in range(2):
        with RangeServer(indexed.parent) as server:
            files = open_checkpoint(f"{server.url}/model")
            before = server.sent.tensor_bytes()
            tree = parameter_specs(spec_from_config(files.config), dtype="float32")
            num_slots = tree["experts"]["gate_MPDF"].shape[1]
            read = _share_of(files, range(host * num_slots // 2, (host + 1) * num_slots // 2))
            assert server.sent.tensor_bytes() - before == read
            total += read
            experts = sum(e.end - e.begin for name, e in files.tensors.items() if ".experts." in name)
    assert total == 2 * (files.num_bytes - experts) + experts


def _share_of(files: CheckpointFiles, slots: range) -> int:
    """Load the parameters as the host of these expert slots does; returns the bytes of its share in files."""
    tree = parameter_specs(spec_from_config(files.config), dtype="float32")
    slots_of_layer = np.tile(np.array(slots), (tree["experts"]["gate_MPDF"].shape[0], 1))
    one = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("devices",)), PartitionSpec())
    cut = {
        group: {name: _with_slots(spec, len(slots)) if spec.num_experts else spec for name, spec in specs.items()}
        for group, specs in tree.items()
    }
    load_parameters(WeightSource(files, CHECKPOINT_RULES, slots_of_layer), cut, sharding_of=lambda _: one)
    held = [f".experts.{slot}." for slot in slots]
    return sum(
        entry.end - entry.begin
        for name, entry in files.tensors.items()
        if ".experts." not in name or any(each in name for each in held)
    )


def _with_slots(spec: ParamSpec, num_slots: int) -> ParamSpec:
    return replace(spec, shape=(spec.shape[0], num_slots, *spec.shape[2:]))


def test_ranges_are_read_at_once(server):
    files = open_checkpoint(f"{server.url}/model")
    server.holds_until = 5
    loaded(files)
    assert server.sent.most_at_once >= 5


def test_what_is_in_flight_is_bounded(server, monkeypatch):
    """By so many bytes and one piece, however slowly they are taken."""
    seen = []
    end = pieces.ReadAhead.__exit__
    monkeypatch.setattr(
        pieces.ReadAhead, "__exit__", lambda self, *rest: (seen.append(self.max_bytes_seen), end(self, *rest))
    )
    monkeypatch.setattr(pieces, "AHEAD_BYTES", 5_000)
    files = open_checkpoint(f"{server.url}/model")
    loaded(files)
    assert 5_000 <= seen[0] <= 5_000 + max(entry.end - entry.begin for entry in files.stored.values())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_fault_that_passes_is_not_noticed(server, indexed, status):
    files = open_checkpoint(f"{server.url}/model")
    server.faults.num_next, server.faults.status = 5, status
    assert_alike(loaded(files), loaded(open_checkpoint(indexed)))


def test_a_connection_that_is_cut_is_opened_again(server, indexed):
    files = open_checkpoint(f"{server.url}/model")
    server.faults.num_next, server.faults.cut_after = 5, 100
    assert_alike(loaded(files), loaded(open_checkpoint(indexed)))


def test_what_was_read_before_a_cut_is_not_read_again(server, indexed, tmp_path, monkeypatch):
    """Another process goes on: every byte comes over the network once."""
    monkeypatch.setattr(transfer, "NUM_ATTEMPTS", 1)
    url = f"{server.url}/model"
    files = open_checkpoint(url, cache=tmp_path)
    taken, read = [], CheckpointFiles._read_stored

    def cut_off(self, name, index):
        taken.append(name)
        if len(taken) == 20:
            server.faults.deny = 503
        return read(self, name, index)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFiles, "_read_stored", cut_off)
        with pytest.raises(CheckpointError, match=r"model-0000.*the server answers 503, at each of 1 attempts$"):
            loaded(files)
    before = server.sent.tensor_bytes()
    assert before > 0
    server.faults.deny = 0
    files = open_checkpoint(url, cache=tmp_path)
    assert_alike(loaded(files), loaded(open_checkpoint(indexed)))
    assert max(server.sent.ranges[key] for key in server.sent.ranges if key[0].endswith(".safetensors")) == 1
    again = server.sent.num_bytes
    loaded(open_checkpoint(url, cache=tmp_path))
    assert server.sent.num_bytes == again, "a whole share starts without the network but for sizes and versions"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spoil", ["a byte of the content", "the end of the journal", "another version"])
def test_what_is_kept_and_was_spoiled_is_read_anew(indexed, tmp_path, spoil):
    shutil.copytree(indexed, tmp_path / "served" / "model")
    with RangeServer(tmp_path / "served") as server:
        loaded(open_checkpoint(f"{server.url}/model", cache=tmp_path / "kept"))
        (folder,) = (tmp_path / "kept").iterdir()
        content = max(folder.glob("*.content"), key=lambda path: path.stat().st_size)
        if spoil == "a byte of the content":
            changed = bytearray(content.read_bytes())
            changed[-1] ^= 1
            content.write_bytes(changed)
        elif spoil == "the end of the journal":
            journal = content.with_suffix(".ranges")
            journal.write_bytes(journal.read_bytes()[:-6])
        else:
            for file in (tmp_path / "served" / "model").glob("*.safetensors"):
                file.touch()
        before = server.sent.tensor_bytes()
        assert_alike(
            loaded(open_checkpoint(f"{server.url}/model", cache=tmp_path / "kept")), loaded(open_checkpoint(indexed))
        )
        assert server.sent.tensor_bytes() > before
        assert len(list(folder.glob(f"{content.name.partition('.safetensors')[0]}*.content"))) == 1


def test_a_disk_that_is_full_ends_the_keeping_only(server, indexed, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rayserve_moe.checkpoints.range_cache.FREE_SHARE", 1.0)
    assert_alike(loaded(open_checkpoint(f"{server.url}/model", cache=tmp_path)), loaded(open_checkpoint(indexed)))
    assert [record.getMessage() for record in caplog.records if "has ended" in record.getMessage()]
    assert not list(tmp_path.rglob("*.content"))


REFUSED = {
    403: "access is forbidden (403): the account or token may not read it",
    401: "not authorised (401): the credentials are missing or have expired",
    404: "no such checkpoint directory: config.json does not exist (404)",
    500: "the server answers 500, at each of 6 attempts",
}


@pytest.mark.parametrize("status", REFUSED)
def test_a_refusal_is_one_line_with_the_url_and_the_cause(server, status):
    server.faults.deny = status
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(f"{server.url}/model")
    message = str(refused.value)
    assert message.startswith(f"{server.url}/model") and message.endswith(REFUSED[status]) and "\n" not in message


def test_a_refusal_while_tensors_are_read_names_the_file(server):
    files = open_checkpoint(f"{server.url}/model")
    server.faults.deny = 403
    with pytest.raises(CheckpointError, match=r"http://.*/model/model-0000.*\.safetensors: .*forbidden \(403\)"):
        loaded(files)


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(CheckpointError, match=r"^http://127\.0\.0\.1:9/model.*cannot be reached: .*at each of 6"):
        open_checkpoint("http://127.0.0.1:9/model")


def test_a_truncated_object_is_refused_before_it_is_read(in_memory):
    system = fsspec.filesystem("memory")
    name = next(path for path in system.ls("/bucket/model", detail=False) if path.endswith(".safetensors"))
    system.pipe_file(name, system.cat_file(name)[:-10])
    with pytest.raises(CheckpointError, match=rf"memory:/{name}: truncated: tensor \S+ ends at byte \d+, the file at"):
        open_checkpoint(in_memory)


def test_an_object_that_ends_early_or_changes_while_it_is_read_is_refused(in_memory):
    system, files = fsspec.filesystem("memory"), open_checkpoint(in_memory)
    name = next(path for path in system.ls("/bucket/model", detail=False) if path.endswith(".safetensors"))
    whole = system.cat_file(name)
    system.pipe_file(name, whole[:-10])
    with pytest.raises(CheckpointError, match=rf"memory:/{name}: cannot read tensor \S+: truncated: it ends at byte"):
        loaded(files)
    system.pipe_file(name, whole)
    with pytest.raises(CheckpointError, match=rf"memory:/{name}: the file has changed since it was opened"):
        loaded(files)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket/model", "Protocol not known: nosuch"),
        ("gs://", "not a URL of a folder"),
        ("memory://bucket/../other", "not a URL of a folder"),
        ("memory://bucket/none", "no such checkpoint directory"),
        ("hf://qwen", "not a model of the Hub: hf://organisation/name"),
    ],
)
def test_a_url_that_names_nothing_is_refused(url, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(url)


def test_reading_is_given_up_between_two_attempts(server, monkeypatch):
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 60.0)
    monkeypatch.setattr(transfer, "MAX_WAIT_S", 60.0)
    server.faults.deny = 503
    given_up = threading.Event()
    threading.Timer(0.2, given_up.set).start()
    with pytest.raises(CheckpointError, match="reading was given up"):
        open_checkpoint(f"{server.url}/model", Reach(given_up=given_up))


@pytest.mark.parametrize(
    ("root", "path", "is_covered"),
    [
        ("gs://bucket/runs", "gs://bucket/runs/1", True),
        ("gs://bucket/runs", "gs://bucket/runs-of-others/1", False),
        ("gs://bucket/runs", "gs://bucket/runs/../secret", False),
        ("gs://bucket/runs", "gs://bucket/runs/%2e%2e/secret", False),
        ("/weights", "gs://bucket/weights", False),
        ("gs://bucket/runs", "/weights", False),
        ("hf://org/model", "hf://org/model@main", True),
        ("hf://org", "hf://org/model", True),
        ("hf://org", "hf://organisation/model", False),
    ],
)
def test_a_root_covers_what_lies_below_it(root, path, is_covered):
    assert Reach((root,)).covers(path) is is_covered


def test_config_and_tokenizer_are_copied_once_and_follow_the_original(server, indexed, tmp_path):
    place = located(f"{server.url}/model", cache_directory=tmp_path)
    folder = with_small_files(place, cache_directory=tmp_path)
    there = {name for name in SMALL_FILES if (indexed / name).exists()}
    assert {"config.json", "tokenizer.json"} <= there == {path.name for path in folder.iterdir()}
    assert all((folder / name).read_bytes() == (indexed / name).read_bytes() for name in there)
    (folder / "merges.txt").write_text("of an earlier version")
    assert with_small_files(place, cache_directory=tmp_path) == folder and not (folder / "merges.txt").exists()


@pytest.mark.parametrize("file", RANK_FILES)
def test_a_rank_file_behind_a_url_is_the_tokenizer(tmp_path, file):
    code = {"tiktoken.model": KIMI, "hy.tiktoken": HUNYUAN}.get(file)
    model = tmp_path / "served" / "model"
    model.mkdir(parents=True)
    write_tekken(model, tekken_content()) if code is None else write_tiktoken(model, code)
    with RangeServer(model.parent) as running:
        place = located(f"{running.url}/model", cache_directory=tmp_path)
        folder = with_small_files(place, cache_directory=tmp_path)
    assert (folder / file).read_bytes() == (model / file).read_bytes()
    assert Tokenizer(folder).encode("the cat 你好") == Tokenizer(model).encode("the cat 你好")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/models/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("gs://b/runs/7/", "7"),
        ("hf://Qwen/Qwen3@" + "a" * 40, "Qwen/Qwen3"),
    ],
)
def test_a_model_is_called_by_its_folder_or_its_id(place, name):
    assert model_name(place) == name


def test_a_config_behind_a_url_is_compiled_without_its_weights(server, indexed):
    url = f"{server.url}/model"
    assert presets.read_config(url) == presets.read_config(str(indexed))
    assert presets.read_config(url, num_layers=1)["num_hidden_layers"] == 1
    with pytest.raises(
        presets.PresetError, match=r"^no preset \(.*\), and http://.*/none: no such checkpoint directory"
    ):
        presets.read_config(f"{server.url}/none")
    assert not any(name.endswith(".safetensors") for name, *_ in server.sent.ranges)
