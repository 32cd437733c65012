"""The built docs in a real browser. `make docs` builds them; without them, or without Chromium, these are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.serving.browser import CHROMIUM, browsing

SITE = Path(__file__).parents[2] / "build" / "site"
NAVIGATION = "[...document.querySelectorAll('nav.md-nav--primary a[href]')].map(link => link.href)"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: `make browser` installs it"),
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="needs the site: `make docs` builds it"),
]


def test_a_reader_goes_from_the_first_page_to_a_reference_page(tmp_path):
    with browsing(tmp_path) as browser:
        browser.open((SITE / "index.html").as_uri())
        assert browser.run("document.querySelector('article h1').textContent").startswith("rayserve_moe")
        links = browser.run(NAVIGATION)
        for target in ("start/first_hour.html", "settings.html", "architecture.html"):
            (found,) = {link.split("#")[0] for link in links if link.split("#")[0].endswith(f"/{target}")}
            browser.open(found)
            browser.until("document.querySelector('article h1') !== null")
        assert browser.run("document.querySelectorAll('article img').length") > 0
        assert browser.run("[...document.querySelectorAll('article img')].every(image => image.naturalWidth > 0)")
        assert [url for url in browser.requested if not url.startswith(("file:", "data:"))] == []
        assert browser.faults == []
