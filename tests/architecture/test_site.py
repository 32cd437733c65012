"""The site's helpers: links out of docs become names, and assets of other hosts are found."""

from __future__ import annotations

import pytest

from scripts.check_site import foreign_assets
from scripts.docs_hooks import without_outside_links

LOCAL = """<script src="assets/a.js"></script><link rel="stylesheet" href="../assets/b.css">
<a href="https://arxiv.org/abs/2412.06464">a paper</a><link rel="canonical" href="https://example.com/"> url(c.woff2)"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[the examples](../examples/grpo)", "the examples (`examples/grpo`)"),
        ("[`README.md`](../README.md)", "`README.md`"),
        ("[settings](settings.md#scheduler)", "[settings](settings.md#scheduler)"),
        ("[a paper](https://arxiv.org/abs/2412.06464)", "[a paper](https://arxiv.org/abs/2412.06464)"),
    ],
)
def test_a_link_that_leaves_the_site_becomes_a_name(text, shown):
    assert without_outside_links(text, "rollouts.md") == shown


def test_a_link_is_read_from_the_folder_of_its_page():
    assert without_outside_links("[all](../../benchmarks/run.py)", "figures/peers.md") == "all (`benchmarks/run.py`)"
    assert without_outside_links("[up](../settings.md)", "figures/peers.md") == "[up](../settings.md)"


@pytest.mark.parametrize("target", ["../gone.py", "../../outside.md"])
def test_a_link_to_nothing_is_an_error(target):
    with pytest.raises(ValueError, match="does not exist"):
        without_outside_links(f"[x]({target})", "rollouts.md")


def test_links_and_local_assets_are_not_foreign():
    assert foreign_assets(LOCAL) == []


@pytest.mark.parametrize(
    "text",
    [
        '<script defer src="https://cdn.example.com/a.js">',
        "<link href=//fonts.example.com/css rel=stylesheet>",
        '<img alt="" src="http://example.com/a.png">',
        "src: url('https://fonts.example.com/a.woff2')",
        '@import "https://example.com/b.css";',
    ],
)
def test_an_asset_of_another_host_is_found(text):
    assert len(foreign_assets(LOCAL + text)) == 1
