"""Each code block of a guide says what checks it; those that nothing runs go through the parsers that users meet."""

from __future__ import annotations

import pytest

from tests.support.docs.block_readers import commands_of, faults_in, is_settings_or_requests
from tests.support.docs.guides import DOCS, ROOT, SCHEMA, Block, blocks_of, fault_of_mark, pages_of

GUIDES = [*pages_of("Start"), *pages_of("Guides")]


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def test_the_navigation_names_the_guides():
    names = {name_of(page) for page in GUIDES}
    assert {"index.md", "start/first_hour.md", "operate/start.md", "grpo.md", "add_a_kernel.md"} <= names


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_each_code_block_of_a_guide_says_what_checks_it(page):
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    faults = [(block.text.splitlines()[0], fault_of_mark(block, page.name)) for block in blocks]
    assert [fault for fault in faults if fault[1]] == []


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_settings_requests_and_blocks_that_a_schema_checks_are_read(page):
    """Settings and requests whatever their mark is."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    assert list(faults_in([block for block in blocks if block.how == SCHEMA or is_settings_or_requests(block)])) == []


def test_the_commands_of_the_readme_are_read():
    blocks = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [block for block in blocks if block.language in ("", "sh")]
    assert len(commands) == 2 and list(faults_in(commands)) == []


MARK = "<!-- checked by README.md -->"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (f"{MARK}\n\n    make serve\n    make b\n\nthen\n\n    make c\n", ["", "no mark"]),
        (f"{MARK}\n\n```sh\nmake serve\n\nmake b\n```\n", [""]),
        (f"{MARK}\n\n## next\n\n    make serve\n", ["no mark"]),
        (f"{MARK}\n\n    rayserve-moe nothing-of-it\n", ["README.md has nothing of this block"]),
        ("<!-- checked by gone.py -->\n\n    make a\n", ["no file gone.py"]),
        ("<!-- checked: schema -->\n\n    make a\n", [""]),
        ("<!-- checked: by eye -->\n\n    make a\n", ["unknown mark 'by eye'"]),
        ("<!-- checked: not run: it pushes an image -->\n\n    make a\n", [""]),
        ("<!-- checked: not run: never -->\n\n    make a\n", ["no reason"]),
        ("- item\n\n    text of the item\n", ["no mark"]),
        ("text\n    of one paragraph\n", []),
    ],
)
def test_a_wrong_mark_is_found(text, faults):
    assert [fault_of_mark(block, "page.md") for block in blocks_of(text)] == faults


def test_commands_are_split_as_a_shell_splits_them():
    text = "# first\nA=1 curl -s x \\\n  -d '{\n\"a\": 1}'  # a comment\n\nmake a && make b &\n"
    assert commands_of(text) == [["curl", "-s", "x", "-d", '{\n"a": 1}'], ["make", "a"], ["make", "b"]]


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("sh", "rayserve-moe serve MODEL --page-size 0", "at least 1"),
        ("sh", "rayserve-moe serve MODEL --no-such-setting 1", "no-such-setting"),
        ("sh", "rayserve-moe scale model", "replicas"),
        ("sh", "rayserve-moe compile-check --config configs/gone.yaml", "does not exist"),
        ("sh", "python -m rayserve_moe.fleet.journal --no-such-flag", "no-such-flag"),
        ("sh", "python -m rayserve_moe.gone", "gone"),
        ("sh", "pip install -e '.[gone]'", "no extra gone"),
        ("sh", "make gone", "no target gone"),
        ("sh", "kubectl apply -k deploy/kuberay/gone", "does not exist"),
        ("sh", "kubectl delete pod x", "no reader for kubectl"),
        ("sh", "docker build .", "no reader for docker"),
        ("sh", "curl localhost:8000/gone", "no route GET /gone"),
        ("sh", "curl localhost:8000/v1/completions", "no route GET"),
        ("sh", """curl localhost:8000/generate -d '{"text": "a", "no_such_field": 1}'""", "no_such_field"),
        ("sh", """curl localhost:8000/generate -d '{"text": 1}'""", "GenerateBody"),
        ("yaml", "no_such_setting: 1", "no_such_setting"),
        ("yaml", "page_size: 0", "page_size"),
        ("yaml", "page_size: 0: 0", "mapping values"),
        ("", "page_size: 0  # or more", "page_size"),
        ("yaml", "livenessProbe: {httpGet: {path: /gone, port: 8000}}", "no route /gone"),
        ("yaml", "livenessProbe: {httpget: {path: /health, port: 8000}}", "no field httpget"),
        ("yaml", "applications: [{name: a, import_path: rayserve_moe.serving.app:build, argz: {}}]", "argz"),
        ("json", '{"no_such_field": 1}', "no route takes this body"),
        ("python", "from rayserve_moe import Gone", "Gone"),
        ("python", "import = 1", "invalid syntax"),
        ("python", "from rayserve_moe.gone import x", "No module"),
    ],
)
def test_a_wrong_block_is_found(language, text, words):
    (fault,) = faults_in([Block(language, text)])
    assert words in fault.partition(": ")[2]


@pytest.mark.parametrize(
    ("language", "text", "is_read"),
    [
        ("yaml", "page_size: 16", True),
        ("", "page_size: 16", True),
        ("sh", "curl localhost:8000/health", True),
        ("", "curl localhost:8000/health", True),
        ("sh", "curl localhost:8000/health; rm x", False),
        ("console", "curl localhost:8000/health", False),
        ("", "make serve", False),
    ],
)
def test_settings_and_requests_are_known(language, text, is_read):
    assert is_settings_or_requests(Block(language, text)) == is_read
