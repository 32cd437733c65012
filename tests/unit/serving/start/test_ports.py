"""Ports of a deployment: all from one block, which is nobody else's."""

from __future__ import annotations

import socket

import pytest

from rayserve_moe.serving.start.ports import BLOCK_SIZE, Ports, StartError, choose_ports, is_free, owner_of


def every_port(ports: Ports) -> list[int]:
    names = [name for name, value in vars(Ports).items() if isinstance(value, property)]
    values = [getattr(ports, name) for name in names]
    singles = [value for value in values if isinstance(value, int)]
    ranges = [range(first, last + 1) for first, last in (value for value in values if isinstance(value, tuple))]
    return singles + [port for one in ranges for port in one]


def test_every_port_has_one_use_and_lies_in_the_block():
    found = every_port(Ports(20_000))
    assert len(found) == len(set(found)) > 80
    assert all(20_000 <= port < 20_000 + BLOCK_SIZE for port in found)


def test_the_block_follows_from_the_http_port_and_passes_over_what_is_taken():
    assert choose_ports(8000, claimed=(), is_free=lambda _: True) == Ports(20_000)
    assert choose_ports(8001, claimed=(), is_free=lambda _: True) == Ports(20_100)
    assert choose_ports(8000, claimed={20_000}, is_free=lambda _: True) == Ports(20_100)
    assert choose_ports(8000, claimed={20_000}, is_free=lambda port: port != 20_199) == Ports(20_200)
    assert choose_ports(20_050, claimed=(), is_free=lambda _: True).first != 20_000
    with pytest.raises(StartError, match="neighbouring ports are free"):
        choose_ports(8000, claimed=(), is_free=lambda _: False)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_not_free_and_its_owner_is_named(host):
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port) and not is_free(port, "127.0.0.1")
        assert "process" in owner_of(port) and "python" in owner_of(port)
    assert is_free(port)
    assert owner_of(port) == "a process of another user"
