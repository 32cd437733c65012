"""Packages stay apart: what a package loads when it is imported, and that each import contract can break."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rayserve_moe
from tests.architecture import picture_page

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "rayserve_moe"
PACKAGES = [name for layer in picture_page.layers() for name in layer]
PLAIN_PYTHON = (
    "requests",
    "config",
    "observability",
    "balancing",
    "scheduling",
    "replay",
    "text",
    "engine",
    "answers",
)
TRAINERS_SIDE = "rollouts.alignment"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
EVERY_PACKAGE = [f"{name}.py" if (PACKAGE / f"{name}.py").is_file() else f"{name}/__init__.py" for name in PACKAGES]

LOAD_PACKAGE = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        importlib.import_module(module.name)
    print(name, *sorted({module.split(".")[0] for module in sys.modules}))
"""

SEEDS = {
    "layers": {"scheduling/seed_a.py": "import rayserve_moe.engine.seed_b", "engine/seed_b.py": ""},
    "plain-python": {"scheduling/seed.py": "from jax import numpy as jnp"},
    "pure-jax": {"kernels/seed.py": "import logging"},
    "one-host": {"execution/seed.py": "import ray"},
    "outside-world": {"serving/seed.py": "import jax"},
    "experts-obey": {"experts/seed.py": "import rayserve_moe.balancing.seed", "balancing/seed.py": ""},
    "families": {
        "model/families/seed_a.py": "import rayserve_moe.model.families.seed_b",
        "model/families/seed_b.py": "",
    },
}


def _loaded_by(*modules: str) -> dict[str, set[str]]:
    """What a process has loaded after each of these, one after the other."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", LOAD_PACKAGE, *modules]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {name: set(loaded) for name, *loaded in map(str.split, text.splitlines())}


def _verdicts(root: Path) -> dict[str, str]:
    """Run the import contracts over the tree at `root`; map each contract's name to KEPT or BROKEN."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "COLUMNS": "200", "NO_COLOR": "1"}
    report = subprocess.run(command, cwd=root, env=environment, check=False, capture_output=True, text=True).stdout
    return dict(re.findall(r"^(.+?) (KEPT|BROKEN)\b", report, re.MULTILINE))


def test_importing_plain_packages_loads_no_array_or_cluster_library() -> None:
    packages = [f"rayserve_moe.{name}" for name in (*PLAIN_PYTHON, TRAINERS_SIDE)]
    loaded = _loaded_by(*packages)
    assert list(loaded) == packages and all("rayserve_moe" in names for names in loaded.values())
    assert {name for name in packages if loaded[name] & {"jax", "jaxlib", "ray", "fastapi"}} == set()
    module = "rayserve_moe.kernels.row_blocks"
    assert "jax" in _loaded_by(module)[module], "it would be seen"


def test_importing_the_package_loads_nothing_else() -> None:
    assert not _loaded_by("sys")["sys"] & {"numpy", "rayserve_moe"}
    command = [sys.executable, "-c", "import sys, rayserve_moe; print(*sys.modules)"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    loaded = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    assert "rayserve_moe" in loaded
    assert not [name for name in loaded if name.startswith(("rayserve_moe.", "numpy", "jax", "ray."))]


@pytest.mark.parametrize("name", rayserve_moe.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(rayserve_moe, name) is not None
    assert name in dir(rayserve_moe)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="EngineManager"):
        _ = rayserve_moe.EngineManager


def test_each_import_contract_breaks_on_its_own_seed_alone(tmp_path: Path) -> None:
    names = {contract["id"]: contract["name"] for contract in CONTRACTS}
    assert set(SEEDS) == set(names), "every contract has a seed that breaks it"
    for contract_id, files in SEEDS.items():
        root = tmp_path / contract_id
        _write_skeleton(root, files)
        broken = {name for name, verdict in _verdicts(root).items() if verdict == "BROKEN"}
        assert broken == {names[contract_id]}


def test_the_import_contracts_hold_on_packages_without_code(tmp_path: Path) -> None:
    _write_skeleton(tmp_path, {})
    assert _verdicts(tmp_path) == {contract["name"]: "KEPT" for contract in CONTRACTS}


def _write_skeleton(root: Path, files: dict[str, str]) -> None:
    """Lay out packages without code, and `files` in them, under the repository's own contracts."""
    root.mkdir(exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    package = root / "src" / "rayserve_moe"
    for name in {*files, "model/families/one.py", *EVERY_PACKAGE}:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""), encoding="utf-8")
    for folder in [package, *(child for child in package.rglob("*") if child.is_dir())]:
        (folder / "__init__.py").touch()
