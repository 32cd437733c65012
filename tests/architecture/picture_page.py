"""The picture of the packages, drawn from the import contract and from the imports that there are.

`python -m tests.architecture.picture_page` writes docs/packages.svg anew.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

from tests.architecture.limits import read_sources

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "rayserve_moe"
PAGE = ROOT / "docs" / "packages.svg"
COLUMN, ROW, TOP = 236, 60, 50
BOX_WIDTH, BOX_HEIGHT, GAP = 112, 30, 10
KINDS = {
    "Ray and HTTP": ("#efe6f7", "cli serving rollouts bench fleet cluster"),
    "plain Python": (
        "#e3f0fb",
        ("answers engine text constraints scheduling replay balancing observability state config requests"),
    ),
    "one host": ("#e2f4e6", "tools inprocess execution checkpoints"),
    "pure JAX": ("#fdebd3", "decoding model experts kernels parallel"),
}
"""What a package may load besides the standard library, as the import contracts have it; a column and a colour each."""
INK, LINE = "#24292f", "#8c959f"


def layers() -> list[list[str]]:
    """The layers of the import contract, top down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    stated = next(contract["layers"] for contract in contracts["contracts"] if "layers" in contract)
    return [re.findall(r"\w+", layer) for layer in stated]


@cache
def imports() -> set[tuple[str, str]]:
    """Which package imports which, as (importer, imported)."""
    found = set()
    for source in read_sources(PACKAGE):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rayserve_moe"):
                names = [node.module] if "." in node.module else [f"rayserve_moe.{each.name}" for each in node.names]
                found |= {(source.package, name.split(".")[1]) for name in names}
    return {(importer, imported) for importer, imported in found if importer not in (imported, "__init__")}


def arrows_up(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Imports that do not point down. Without any there is no circle."""
    depth = {name: row for row, layer in enumerate(layers()) for name in layer}
    return {(importer, imported) for importer, imported in edges if depth[importer] >= depth[imported]}


def direct(edges: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Edges that no longer way replaces: the rest follows from them."""
    below = {importer: {imported for other, imported in edges if other == importer} for importer, _ in edges}

    def reachable(name: str) -> set[str]:
        return below.get(name, set()).union(*map(reachable, below.get(name, ())))

    return sorted(
        (importer, imported)
        for importer, imported in edges
        if not any(imported in reachable(other) for other in below[importer] - {imported})
    )


def page() -> str:
    """Return the picture's text."""
    places = _places()
    height, width = TOP + len(layers()) * ROW, _columns()[1]
    edges = imports()
    assert not arrows_up(edges), f"imports point down, but for {sorted(arrows_up(edges))}"
    described = "; ".join(f"{importer} imports {imported}" for importer, imported in direct(edges))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    text = f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}"'
    head = f'<path d="M0 0L7 3L0 6z" fill="{LINE}"/>'
    marker = f'<marker id="end" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">{head}</marker>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc" {text}>',
        '<title id="title">Packages and what they import</title>',
        f'<desc id="desc">{escape(described)}</desc>',
        f"<defs>{marker}</defs>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(),
        *(_arrow(places[importer], places[imported]) for importer, imported in direct(edges)),
        *(_box(name, x, y) for name, (x, y) in places.items()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _beside(layer: list[str], names: str) -> list[str]:
    """Return the packages of a kind in a layer, which stand side by side."""
    return [name for name in layer if name in names.split()]


def _columns() -> tuple[list[float], int]:
    """Return the middle of each kind's column, which holds its longest row of boxes, and the picture's width."""
    most = [max(len(_beside(layer, names)) for layer in layers()) for _, names in KINDS.values()]
    widths = [max(COLUMN, count * (BOX_WIDTH + GAP) + GAP) for count in most]
    return [sum(widths[:i]) + width / 2 for i, width in enumerate(widths)], sum(widths)


def _places() -> dict[str, tuple[float, float]]:
    """Middle and top of every box: its layer's row, its kind's column, side by side where a layer has several."""
    places, (middles, _) = {}, _columns()
    for row, layer in enumerate(layers()):
        for middle, (_, names) in zip(middles, KINDS.values(), strict=True):
            beside = _beside(layer, names)
            for i, name in enumerate(beside):
                places[name] = (middle + (i - (len(beside) - 1) / 2) * (BOX_WIDTH + GAP), TOP + row * ROW)
    return places


def _legend() -> list[str]:
    parts = [
        f'<text x="{middle:.0f}" y="28" text-anchor="middle" font-size="15">{kind}</text>'
        for middle, kind in zip(_columns()[0], KINDS, strict=True)
    ]
    note = "An arrow is an import; what follows from others is left out."
    return [*parts, f'<text x="20" y="{TOP + len(layers()) * ROW - 8}" font-size="12">{note}</text>']


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From box to box, around those between them where both are in one column."""
    (x0, y0), (x1, y1) = (start[0], start[1] + BOX_HEIGHT), (end[0], end[1] - 2)
    bend = (y1 - y0) / 2
    side = BOX_WIDTH * 1.2 if abs(x1 - x0) < BOX_WIDTH and y1 - y0 > ROW else 0
    path = f"M{x0:.0f} {y0:.0f}C{x0 - side:.0f} {y0 + bend:.0f} {x1 - side:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.3" marker-end="url(#end)"/>'


def _box(name: str, x: float, y: float) -> str:
    colour = next(colour for colour, names in KINDS.values() if name in names.split())
    box = f'x="{x - BOX_WIDTH / 2:.0f}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"'
    text = f'x="{x:.0f}" y="{y + BOX_HEIGHT / 2 + 5:.0f}" text-anchor="middle" font-weight="600"'
    return f'<rect {box} fill="{colour}" stroke="{INK}"/><text {text}>{name}</text>'


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
