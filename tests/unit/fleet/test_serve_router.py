"""What is private to Ray Serve is checked before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.serve import Application
from ray.serve._private import constants

from rayserve_moe.fleet import serve_router
from rayserve_moe.fleet.serve_router import unknown_ray


@pytest.fixture(autouse=True)
def haproxy(monkeypatch):
    monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", True)


def test_the_installed_ray_is_known():
    assert unknown_ray() is None


def test_without_haproxy_there_are_no_routers(monkeypatch):
    monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", False)
    assert "RAY_SERVE_ENABLE_HA_PROXY" in (unknown_ray() or "")


def test_another_ray_is_named(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    assert "2.61.0" in (unknown_ray() or "")


def test_a_ray_without_the_hook_is_named(monkeypatch):
    monkeypatch.delattr(Application, "_with_ingress_request_router")
    assert "ingress request router" in (unknown_ray() or "")


def test_another_form_of_answers_is_named(monkeypatch):
    template = 'local id = json_body:match(\'"actor"%s*:%s*"([^"]+)"\')'
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: template)
    assert "pattern" in (unknown_ray() or "")


def test_serve_can_import_the_router_of_a_handle():
    module, _, name = serve_router.LOAD_ROUTER.rpartition(".")
    assert module == serve_router.__name__ and getattr(serve_router, name) is serve_router.LoadRouter
