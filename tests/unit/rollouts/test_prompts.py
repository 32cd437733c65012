"""Prompts: every row by itself, each with an id that stays its own."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayserve_moe.rollouts.prompts import (
    SAMPLING,
    BadRow,
    PromptsError,
    Row,
    check_sampling,
    count_rows,
    prompt_ids_of,
    read_rows,
    seed_of,
)
from rayserve_moe.serving.api.schemas.known_fields import FIELDS
from rayserve_moe.serving.api.schemas.native import NativeSampling

GOOD: list[dict[str, Any]] = [
    {"text": "1+1="},
    {"id": "b", "input_ids": [1, 2], "sampling_params": {"temperature": 0.5, "stop": ["x"]}},
    {"id": 3, "messages": [{"role": "user", "content": "hi"}], "answer": "unread"},
]
BAD = {
    b"not json": "not JSON",
    b"[" * 100_000: "not JSON",
    b'"text"': "not a JSON object",
    b"\xff\xfe": "not JSON",
    b"{}": "one of text",
    b'{"text": "a", "input_ids": [1]}': "one of text",
    b'{"text": ""}': "non-empty string",
    b'{"text": 5}': "non-empty string",
    b'{"input_ids": []}': "non-empty list",
    b'{"input_ids": [1, -1]}': "token ids",
    b'{"input_ids": [true]}': "token ids",
    b'{"input_ids": [[1]]}': "token ids",
    b'{"messages": ["hi"]}': "list of objects",
    b'{"text": "a", "id": ""}': "printable",
    b'{"text": "a", "id": "\\ud800"}': "printable",
    b'{"text": "a", "id": [1]}': "`id`",
    b'{"text": "a", "sampling_params": 1}': "should be an object",
    b'{"text": "a", "sampling_params": {"n": 2}}': "may only hold",
    b'{"text": "a", "sampling_params": {"temperature": NaN}}': "temperature",
    b'{"text": "a", "sampling_params": {"temperature": true}}': "temperature",
    b'{"text": "a", "sampling_params": {"max_new_tokens": 1.5}}': "max_new_tokens",
    b'{"text": "a", "sampling_params": {"stop": [1]}}': "stop",
    b'{"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}': "logit_bias",
}


def rows_of(tmp_path: Path, lines: list[bytes]) -> list[Row]:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    assert count_rows(file) == sum(not line.isspace() and line != b"" for line in lines)
    return list(read_rows(file))


def test_bad_rows_are_told_and_harm_no_other(tmp_path: Path) -> None:
    lines = [json.dumps(GOOD[0]).encode()]
    for line in BAD:
        lines += [line, json.dumps({"input_ids": [len(lines)]}).encode(), b"  "]
    rows = rows_of(tmp_path, lines)
    assert [row.fault is None for row in rows] == [True] + [False, True] * len(BAD)
    for row, reason in zip(rows[1::2], BAD.values(), strict=True):
        assert row.fault is not None and reason in row.fault
    assert len({row.prompt_id for row in rows}) == len(rows)
    assert [row.position for row in rows] == list(range(len(rows)))


def test_ids_stay_with_their_rows(tmp_path: Path) -> None:
    """An id is the row's own, or follows from its place and its content: appending rows changes none."""
    lines = [json.dumps(row).encode() for row in GOOD] + [b"oops"]
    before = [row.prompt_id for row in rows_of(tmp_path, lines)]
    assert before[1:3] == ["b", "3"]
    after = [row.prompt_id for row in rows_of(tmp_path, [*lines, lines[0]])]
    assert after[:4] == before and after[4] not in before
    mended = [row.prompt_id for row in rows_of(tmp_path, [*lines[:3], b'{"text": "mended"}'])]
    assert mended[:3] == before[:3] and mended[3] != before[3]


def test_the_second_row_of_an_id_is_at_fault(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [b'{"id": 7, "text": "a"}', b'{"id": "7", "text": "b"}', b'{"id": 7, "text": "c"}'])
    assert rows[0].fault is None and all("earlier row" in (row.fault or "") for row in rows[1:])
    assert len({row.prompt_id for row in rows}) == 3


def test_parquet_rows_are_those_of_jsonl(tmp_path: Path) -> None:
    """Absent fields are null in Parquet, and structs hold what any row has; JSON in a string does as well."""
    rows = [{**row, "id": str(row.get("id", "x"))} for row in GOOD]
    file = tmp_path / "prompts.parquet"
    pq.write_table(
        pa.Table.from_pylist(
            [{**dict.fromkeys(("text", "input_ids", "messages", "sampling_params")), **row} for row in rows]
        ),
        file,
    )
    found = list(read_rows(file))
    wanted = rows_of(tmp_path, [json.dumps(row).encode() for row in rows])
    assert count_rows(file) == 3
    assert [(row.prompt_id, row.content, row.sampling, row.fault) for row in found] == [
        (row.prompt_id, row.content, row.sampling, row.fault) for row in wanted
    ]
    texts = [{"text": "a", "sampling_params": '{"temperature": 0.25}'}, {"text": "a", "sampling_params": "{"}]
    pq.write_table(pa.Table.from_pylist(texts), file)
    first, second = read_rows(file)
    assert first.sampling == {"temperature": 0.25} and "not JSON" in (second.fault or "")


def test_other_fields_come_through(tmp_path: Path) -> None:
    """Whatever JSON holds is the same again, and what only Parquet holds is text."""
    others = {"answer": "82\ud800", "tags": [1, None, {"deep": 1e300}]}
    (row,) = rows_of(tmp_path, [json.dumps({"text": "a", "id": "x", **others}).encode()])
    assert row.others is not None and json.loads(row.others) == others and row.others.isascii()
    (row,) = rows_of(tmp_path, [b'{"text": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}"])
    assert row.fault is None or "JSON" in row.fault
    file = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": "a", "raw": b"\x01", "day": date(2026, 1, 2), "n": 5}]), file)
    (row,) = read_rows(file)
    assert json.loads(row.others or "") == {"raw": "01", "day": "2026-01-02", "n": 5}


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    for path in (broken, tmp_path / "absent.jsonl"):
        with pytest.raises(PromptsError, match=path.name):
            count_rows(path)


def test_text_needs_a_tokenizer() -> None:
    assert prompt_ids_of(Row(0, "a", {"input_ids": [4, 5]}), None) == [4, 5]
    for content in ({"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(BadRow, match="tokenizer"):
            prompt_ids_of(Row(0, "a", content), None)


def test_rows_may_hold_what_the_server_computes() -> None:
    computed = FIELDS[NativeSampling].computed
    apart = {"n", "first_choice", "max_thinking_tokens"}
    assert computed - SAMPLING.keys() == apart, "the job's own, and a limit that needs the markers of a chat"
    assert computed >= SAMPLING.keys()


TEXTS = {"stop", "stop_regex", "regex", "ebnf", "json_schema", "structural_tag"}


def test_bounds_of_sampling_parameters() -> None:
    assert check_sampling({"temperature": 0, "logit_bias": {"5": -100}, "top_k": -1}) is not None
    for name in SAMPLING:
        for wrong in (None, 3 if name in TEXTS else "word", 10**400, [["x"]], -(10**30)):
            with pytest.raises(BadRow, match="sampling_params"):
                check_sampling({name: wrong})


def test_seeds_follow_from_the_job_and_the_prompt_alone() -> None:
    seeds = [seed_of(job, prompt, sampling={}) for job in (0, 1) for prompt in ("a", "b")]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**32 for seed in seeds)
    assert seed_of(0, "a", sampling={"sampling_seed": 1}) == seed_of(1, "a", sampling={"temperature": 0.1})
