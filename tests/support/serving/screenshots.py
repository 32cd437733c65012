"""Screenshots of the pages, light, dark and narrow: `python -m tests.support.serving.screenshots DIRECTORY`.

They show the calculator, or with `--url` any server: one with `enable_eplb` has ranks and plans to show. `--site` adds
pages of the built docs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from tests.support.session.xla_flags import process_flags

os.environ["XLA_FLAGS"] = process_flags()  # before anything imports jax

import httpx

from rayserve_moe import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.serving.browser import Browser, browsing
from tests.support.serving.http_server import running

SETTINGS = {
    "model_path": "trained:calculator",
    "enable_return_routed_experts": True,
    "max_model_len": 256,
    "max_step_tokens": 64,
    "num_pages": 200,
    "max_running_requests": 8,
    "precompile_bs_paddings": [8],
}
QUESTIONS = ("37+45=", "128+64=", "905+17=")
WINDOWS = {
    "light": {"width": 1280, "height": 800},
    "dark": {"width": 1280, "height": 800, "is_dark": True},
    "narrow": {"width": 390, "height": 800, "is_dark": True},
}
SITE_PAGES = ("index", "operate/start", "architecture", "settings")
IS_IDLE = "document.getElementById('send').disabled === false"


def count_experts(url: str) -> None:
    """Ask until the server has read its counts."""
    with httpx.Client(base_url=url, timeout=600) as http:
        every = http.get("/experts/state").json()["counts_every"]
        body = {"prompt": list(QUESTIONS), "max_tokens": 2 * every, "ignore_eos": True, "temperature": 1.0}
        http.post("/v1/completions", json=body).raise_for_status()


def show_chat(browser: Browser, url: str, window: dict) -> None:
    """Hold a short conversation, and choose a token of its last answer."""
    browser.open(f"{url}/", **window)
    browser.until("document.getElementById('model').textContent !== 'rayserve_moe'")
    browser.run("document.getElementById('temperature').value = '0'")
    for number, question in enumerate(QUESTIONS, 1):
        browser.run("document.getElementById('prompt').focus()")
        browser.type(question)
        browser.press("Enter", code=13, text="\r")
        browser.until(f"{IS_IDLE} && document.querySelectorAll('.message.assistant .token').length >= {number}")
    browser.run("document.querySelector('.message:last-child .token').click()")
    browser.run("document.querySelector('#experts button')?.click()")


def show_experts(browser: Browser, url: str, window: dict) -> None:
    """Show the loads of now."""
    browser.open(f"{url}/experts", **window)
    browser.until("!document.getElementById('all').hidden")


def show_docs(browser: Browser, url: str, window: dict) -> None:
    """Open a route."""
    browser.open(f"{url}/docs", **window)
    browser.until("document.querySelectorAll('.route').length > 0")
    browser.run("document.getElementById('post/generate').open = true")
    browser.until("document.getElementById('post/generate').querySelector('table')")


def take(url: str, directory: Path) -> None:
    """Write a picture of every page in every window."""
    count_experts(url)
    with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as browser:
        for page, show in {"chat": show_chat, "experts": show_experts, "docs": show_docs}.items():
            for name, window in WINDOWS.items():
                show(browser, url, window)
                browser.until("document.getElementById('state').textContent.startsWith('serving')")
                browser.picture(directory / f"{page}_{name}.png")
        assert browser.faults == [], browser.faults


def take_site(site: Path, directory: Path) -> None:
    """Write a picture of some pages of the built docs in every window. Raises OSError without such a site."""
    pages = {page: (site / f"{page}.html").resolve(strict=True) for page in SITE_PAGES}
    with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as browser:
        for page, path in pages.items():
            for name, window in WINDOWS.items():
                browser.open(path.as_uri(), **window)
                browser.until("document.querySelector('article h1') !== null")
                browser.picture(directory / f"site_{page.replace('/', '_')}_{name}.png")


def main() -> None:
    """Serve the calculator, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", help="a server that runs, instead of one of this command's own")
    parser.add_argument("--site", type=Path, help="folder of the built docs")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.site:
        take_site(options.site, options.directory)
    if options.url:
        take(options.url, options.directory)
        return
    with Engine(**SETTINGS) as engine, running(create_api(ApiState(engine.loop, engine.tokenizer))) as url:
        take(url, options.directory)


if __name__ == "__main__":
    main()
