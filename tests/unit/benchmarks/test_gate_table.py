"""A row of compiled programs shows the decode step and the largest program; what did not compile is listed."""

from __future__ import annotations

from benchmarks.gate_table import compile_gate


def program(name: str, peak: float, copied: int = 0) -> dict:
    memory = {"peak": peak * 1e9, "temporaries": peak * 1e8, "limit": 32e9}
    return {"name": name, "memory": memory, "copied_bytes": {"weights": copied}, "compile_s": 1.5}


def row(programs: list[dict]) -> list[str]:
    table = compile_gate({"m@t": {"num_layers": 2, "programs": programs}}).split("\n\n")[0]
    return [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]


def test_a_case_shows_its_decode_step_and_its_largest_program():
    programs = [program("decode_forward", 9), program("decode_2", 3), program("decode_16", 4), program("prefill", 8, 5)]
    assert row(programs) == ["m@t, 2 layers", "4", "4.00", "decode_forward", "9.00", "32.00", "0.90", "5", "6", ""]


def test_seconds_of_processors_are_added_up_if_all_programs_have_them():
    programs = [program("decode_16", 4) | {"compile_cpu_s": 2.2}, program("prefill", 8) | {"compile_cpu_s": 30.4}]
    assert row(programs)[-2:] == ["3", "33"]
    assert row([*programs, program("sample_16", 2)])[-1] == ""


def test_a_case_without_a_decode_step_has_an_empty_cell():
    assert row([program("sample_16", 2)])[2:4] == ["", "sample_16"]


def test_programs_that_do_not_compile_are_listed_with_their_errors():
    failed = {"name": "prefill", "memory": None, "error": "too large"}
    text = compile_gate({"m@t": {"num_layers": 2, "programs": [failed]}, "n": {"num_layers": 1, "programs": []}})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line]
    assert rows[2] == ["m@t, 2 layers", "1", *[""] * 8] and ["m@t", "prefill", "too large"] in rows
