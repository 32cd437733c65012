"""Schemas of the official suite: which are taken, and which answers of a random model are valid.

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0
    python -m benchmarks.schema_suite jsonschema-4.26.0.tar.gz [--answers 1000] [--out FILE.json]

The schemas are those of draft 2020-12 that the package's source distribution has. One that is refused must be refused
with 400 and its keyword. The others are bounded (`bounded`), since a model of random weights ends neither strings nor
lists by itself, and answered by turns until so many answers have ended by `stop`; each of these is held against the
schema as it stands in the suite.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.table import tables
from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

SUITE = "/json/tests/draft2020-12/"
MAX_TOKENS, AT_ONCE = 300, 16
ENGINE = {"max_running_requests": AT_ONCE, "max_step_tokens": 64, "max_model_len": 320, "num_pages": 400}
PROMPT = [5, 6]
BOUNDS = {"maxLength": 8, "maxItems": 3, "minimum": -99, "maximum": 99}
OPPOSITES = {"maxLength": "minLength", "maxItems": "minItems", "minimum": "maximum", "maximum": "minimum"}
WITHIN_ONE = ("items", "additionalProperties")
WITHIN_EACH = ("properties", "patternProperties", "$defs", "definitions")
WITHIN_LIST = ("prefixItems", "allOf", "anyOf", "oneOf")

Schema = dict[str, Any] | bool


def schemas_of(sdist: Path) -> list[tuple[str, Schema]]:
    """Return the schemas of the suite with their places, except for optional behaviour."""
    found = []
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getnames()):
            _, _, file = member.partition(SUITE)
            if file.endswith(".json") and "/" not in file:
                text = archive.extractfile(member)
                assert text is not None, "a file of the suite is a plain one"
                groups = json.load(text)
                found += [(f"{file}: {group['description']}", group["schema"]) for group in groups]
    return found


def bounded(schema: Schema) -> Schema:
    """Return a narrower schema: short strings and lists and small numbers, unless it limits their size."""
    if isinstance(schema, bool):
        return dict(BOUNDS) if schema else schema
    narrow = dict(schema)
    for name in WITHIN_ONE:
        if name in narrow:
            narrow[name] = bounded(narrow[name])
    for name in WITHIN_EACH:
        if isinstance(narrow.get(name), dict):
            narrow[name] = {key: bounded(one) for key, one in narrow[name].items()}
    for name in WITHIN_LIST:
        if isinstance(narrow.get(name), list):
            narrow[name] = [bounded(one) for one in narrow[name]]
    if not narrow.keys() & {"$ref", "const", "enum"}:
        given = {name.replace("exclusiveM", "m") for name in schema}
        narrow |= {name: most for name, most in BOUNDS.items() if not given & {name, OPPOSITES[name]}}
    return narrow


class Judged:
    """Counts answers by how they ended, and keeps those that are not valid."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.invalid: list[list[str]] = []
        self.stopped_by: Counter[str] = Counter()

    def judge(self, place: str, schema: Schema, choice: dict[str, Any]) -> None:
        """Take one answer to a schema."""
        self.ends[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            self.stopped_by[place] += 1
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(choice["text"]))
            except (ValueError, jsonschema.ValidationError) as error:
                self.invalid.append([place, choice["text"], type(error).__name__])


async def run(engine: Engine, schemas: list[tuple[str, Schema]], *, answers: int) -> dict[str, Any]:
    """Ask for everything; returns the counts."""
    app = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=600) as client:
        taken, refused = await _sorted_out(client, schemas)
        asked = [(place, schema, await _narrowest(client, schema)) for place, schema in taken]
        judged, rounds = Judged(), _rounds(asked)
        while judged.ends["stop"] < answers:
            await asyncio.gather(*(_ask(client, judged, *next(rounds)) for _ in range(AT_ONCE)))
    return {
        "schemas": len(schemas),
        "taken": len(taken),
        "bounded": sum(schema != narrow for _, schema, narrow in asked),
        "refused": dict(refused),
        "ends": dict(judged.ends),
        "schemas_with_a_stop": len(judged.stopped_by),
        "invalid": judged.invalid,
    }


def _rounds(asked: list[tuple[str, Schema, Schema]]) -> Iterator[tuple[str, Schema, Schema, int]]:
    seed = 0
    while True:
        yield from ((*each, seed) for each in asked)
        seed += 1


async def _sorted_out(
    client: httpx.AsyncClient, schemas: list[tuple[str, Schema]]
) -> tuple[list[tuple[str, Schema]], Counter[str]]:
    """Return the accepted schemas, and the number refused by each keyword."""
    taken, refused = [], Counter()
    for place, schema in schemas:
        answer = await _post(client, schema, max_tokens=1)
        if answer.status_code == 200:
            taken.append((place, schema))
            continue
        assert answer.status_code == 400, (place, answer.status_code, answer.text)
        message = answer.json()["error"]["message"]
        named = re.search(r"`([^`]+)` at #", message)
        assert named or schema is False, (place, message)
        refused[named.group(1) if named else "false"] += 1
    return taken, refused


async def _narrowest(client: httpx.AsyncClient, schema: Schema) -> Schema:
    """Return the bounded schema if it is accepted, else the schema itself."""
    answer = await _post(client, bounded(schema), max_tokens=1)
    return bounded(schema) if answer.status_code == 200 else schema


async def _ask(
    client: httpx.AsyncClient, judged: Judged, place: str, schema: Schema, narrow: Schema, seed: int
) -> None:
    answer = await _post(client, narrow, max_tokens=MAX_TOKENS, seed=seed)
    assert answer.status_code == 200, (place, answer.text)
    judged.judge(place, schema, answer.json()["choices"][0])


async def _post(client: httpx.AsyncClient, schema: Schema, **fields: Any) -> httpx.Response:
    structured = {"json": json.dumps(schema)}
    return await client.post("/v1/completions", json={"prompt": PROMPT, "structured_outputs": structured} | fields)


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / "schema_suite.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "tiny", PRESETS["tiny"], dtype="float32")
        with Engine(model_path=str(checkpoint), precompile_bs_paddings=[AT_ONCE], **ENGINE) as engine:
            found = asyncio.run(run(engine, schemas_of(arguments.sdist), answers=arguments.answers))
    result = {"facts": machine_facts(load_before), "schema_suite": found}
    save(result, arguments.out)
    note(f"{found['ends']}, {len(found['invalid'])} invalid")
    print(tables(result))


if __name__ == "__main__":
    main()
