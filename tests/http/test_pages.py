"""Pages for browsers: open to everyone, and nothing from elsewhere; what they request needs the key."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
import pytest

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api.routes.pages import FOLDER, INDEX, PAGES, read_page
from rayserve_moe.serving.api.schemas.known_fields import FIELDS
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.field_docs import FIELD_DOCS
from rayserve_moe.serving.http import create_api
from tests.support.serving.http_server import KEY, running

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PREFIX = "/moe"
WAYS_TO_WRITE_HTML = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"


def api_with(**server):
    """An application whose engine nobody asks: pages need none."""
    return create_api(ApiState(loop=None, tokenizer=None, server=ServerSettings(**server)))


@pytest.fixture(scope="module")
def pages():
    with running(api_with()) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def locked():
    with running(api_with(api_key=KEY)) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def below_a_prefix():
    """As Serve calls an application with a route prefix: the path is whole, and `root_path` says what to take off."""
    api = api_with()

    async def prefixed(scope, receive, send):
        await api({**scope, "root_path": PREFIX} if scope["type"] == "http" else scope, receive, send)

    with running(prefixed) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_one_document_that_only_its_own_script_and_style_apply_to(pages, path):
    answer = pages.get(path, headers=HTML)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert re.findall(r"(?:https?:)?//[a-z]", answer.text) == []
    assert re.findall(r"<script[^>]+src|<link[^>]+stylesheet|@import|url\(|\sstyle=|\son[a-z]+=\"", answer.text) == []
    assert re.findall(r"/\* page|<!--", answer.text) == [], "every shared part is in it"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.iterdir()))
def test_no_page_writes_html(name):
    """What a model says becomes text, whatever it says."""
    assert re.findall(WAYS_TO_WRITE_HTML, (FOLDER / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", PAGES)
def test_head_answers_as_get_without_the_text(pages, path):
    got, asked = pages.get(path, headers=HTML), pages.head(path, headers=HTML)
    assert asked.status_code == 200 and asked.content == b""
    assert {**asked.headers, "date": ""} == {**got.headers, "date": ""}
    assert asked.headers["content-length"] == str(len(got.content))


@pytest.mark.parametrize("path", PAGES)
def test_a_browser_keeps_a_page_until_it_changes(pages, path):
    first = pages.get(path, headers=HTML)
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    again = pages.get(path, headers={**HTML, "if-none-match": f'"other", {tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert pages.get(path, headers={**HTML, "if-none-match": '"other"'}).status_code == 200
    assert len({read_page(each).headers["ETag"] for each in PAGES}) == len(PAGES)


@pytest.mark.parametrize("accept", ["application/json", "*/*", "", "text/html;q=0, */*"])
def test_a_program_that_asks_for_the_root_gets_json(pages, accept):
    answer = pages.get("/", headers={"accept": accept})
    assert answer.status_code == 200 and answer.json() == INDEX and "etag" not in answer.headers
    assert answer.headers["vary"] == pages.get("/", headers=HTML).headers["vary"] == "Accept"


def test_every_path_that_the_root_names_is_a_route(pages):
    routes = pages.get(INDEX["description"]).json()["paths"]
    assert {*INDEX["pages"], INDEX["chat"], INDEX["health"]} <= routes.keys()


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_open_and_what_they_request_is_not(locked, path):
    page = locked.get(path, headers=HTML)
    assert page.status_code == 200 and KEY not in page.text
    assert locked.get("/openapi.json").status_code == 401
    assert locked.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize("path", PAGES)
def test_paths_in_pages_are_relative(path):
    """So that a page works below any prefix."""
    text = read_page(path).text
    requested = re.findall(r"""(?:ask|fetch|post)\(["'`]([^"'`]+)""", text) + re.findall(r'href="([^"]*)"', text)
    assert len(requested) > 6 and not [each for each in requested if each.startswith("/") or "://" in each]


def test_the_bare_prefix_leads_to_the_page(below_a_prefix):
    bare = below_a_prefix.get(f"{PREFIX}?a=b", headers=HTML)
    assert (bare.status_code, bare.headers["location"]) == (308, str(bare.url.copy_with(path=f"{PREFIX}/")))
    assert below_a_prefix.get(f"{PREFIX}/", headers=HTML).text == read_page("/").text
    assert below_a_prefix.get(f"{PREFIX}/docs", headers=HTML).text == read_page("/docs").text
    for unknown in (below_a_prefix.post(PREFIX), below_a_prefix.get(f"{PREFIX}/nothing")):
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "route_not_found")


def test_every_route_has_a_group_and_a_purpose_and_every_field_a_description(pages):
    """They are what `/docs` shows."""
    description = pages.get("/openapi.json").json()
    operations = [operation for methods in description["paths"].values() for operation in methods.values()]
    assert all(operation["summary"] and len(operation["tags"]) == 1 for operation in operations)
    schemas = description["components"]["schemas"]
    assert {schema.__name__ for schema in FIELDS} <= schemas.keys()
    bodies = {title: schema for title, schema in schemas.items() if title != "Error"}
    fields = {
        f"{title}.{name}": field
        for title, schema in bodies.items()
        for name, field in schema.get("properties", {}).items()
    }
    assert [name for name, field in fields.items() if not field.get("description")] == []
    names = {name.partition(".")[2] for name in fields} | fields.keys()
    assert sorted(FIELD_DOCS.keys() - names) == [], "of fields that no body has"
