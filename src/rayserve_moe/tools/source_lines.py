"""Lines of our source that the instructions of a program were traced from, out of the tables ahead of its text."""

from __future__ import annotations

import re

PACKAGE = "rayserve_moe/"
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"^(\d+) (.*)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")


def source_lines(text: str) -> dict[int, str]:
    """By the id of a stack frame its innermost line in this package, as `file:line function`; others are left out."""
    names, numbers = _tables(text)
    locations, frames = numbers["FileLocations"], numbers["StackFrames"]
    found = {}
    for frame_id in frames:
        at = frame_id
        # A parent's id stands one higher; none has 1, or no entry.
        while at in frames:
            location = locations.get(frames[at].get("file_location_id", 0), {})
            file = names["FileNames"].get(location.get("file_name_id", 0), "")
            if PACKAGE in file:
                function = names["FunctionNames"].get(location.get("function_name_id", 0), "")
                found[frame_id] = f"{file.rpartition(PACKAGE)[2]}:{location.get('line', 0)} {function}"
                break
            at = frames[at].get("parent_frame_id", 0) - 1
    return found


def _tables(text: str) -> tuple[dict[str, dict[int, str]], dict[str, dict[int, dict[str, int]]]]:
    """Rows of the tables by id: as text, and as the numbers in them."""
    names: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    table = ""
    for line in text.splitlines():
        row = _ROW.match(line)
        if row and table:
            names[table][int(row.group(1))] = row.group(2).strip('"')
        elif line:
            table = line if line in _TABLES else ""
    numbers = {
        name: {key: {field: int(value) for field, value in _NUMBER.findall(row)} for key, row in rows.items()}
        for name, rows in names.items()
    }
    return names, numbers
