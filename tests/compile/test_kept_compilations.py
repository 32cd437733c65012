"""A program for a TPU is read from disk unless its code, chip, options or compiler have changed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compile.topologies import compile_for
from tests.support.session.kept_compilations import KeptCompilations


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    kept = KeptCompilations(tmp_path)
    kept.start()
    yield tmp_path
    kept.stop()


def compiled(*others: dict[str, Any]) -> list[Any]:
    """Compile programs from one source line, because the lines of callers are part of a program."""
    return [_compiled(**values) for values in ({}, *others)]


def _compiled(*, chip: str = "v5e", rows: int = 16, added: int = 1) -> Any:
    matrix, of_rows = (jax.ShapeDtypeStruct((size, 256), jnp.bfloat16) for size in (256, rows))
    return compile_for(chip, lambda matrix, rows: rows @ matrix + added, matrix, of_rows)


def test_a_program_is_read_as_it_was_compiled_and_not_compiled_again(folder: Path) -> None:
    first, second = compiled({})
    assert first == second
    assert "HloModule" in first.as_text() and first.memory_analysis().argument_size_in_bytes >= 2 * (256 + 16) * 256


def test_another_program_chip_or_line_of_source_is_compiled(folder: Path) -> None:
    compiled({"rows": 32}, {"added": 2}, {"chip": "v6e"})
    assert len([*folder.iterdir()]) == 4
    compiled()
    assert len([*folder.iterdir()]) == 5


DAMAGED = {
    "empty": b"",
    "no gzip": b"no gzip",
    "half a document": gzip.compress(b'{"text": "half'),
    "a document without the text": gzip.compress(b'{"size": 1}'),
}


@pytest.mark.parametrize("damaged", [None, *DAMAGED.values()], ids=["whole", *DAMAGED])
def test_what_is_on_disk_is_read_unless_it_is_damaged(folder: Path, damaged: bytes | None) -> None:
    changed = gzip.compress(json.dumps({"text": "as it is on disk", "memory": {}}).encode())
    texts = []
    for content in (changed if damaged is None else damaged, None):
        texts += [program.as_text() for program in compiled()]
        (file,) = folder.iterdir()
        if content is not None:
            file.write_bytes(content)
    assert texts[1] == ("as it is on disk" if damaged is None else texts[0])
    assert (file.read_bytes() == changed) == (damaged is None)


def test_what_does_not_compile_is_not_kept(folder: Path) -> None:
    absurd = jax.ShapeDtypeStruct((1 << 30, 1 << 10), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_for("v5e", lambda array: array + 1, absurd)
    assert not [*folder.iterdir()]


def test_programs_of_this_process_still_run(folder: Path) -> None:
    assert jax.jit(lambda x: x + 1).lower(1).compile()(1) == 2
    assert not [*folder.iterdir()]
