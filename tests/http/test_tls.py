"""TLS at the front: HAProxy speaks it with the files that were given, and nothing else at that port."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rayserve_moe.cli import main
from rayserve_moe.serving.start.command import linked_certificate
from rayserve_moe.serving.start.validation import TlsFiles
from tests.support.serving.certificates import write_certificate
from tests.support.serving.haproxy_front import Front, running_front

LIMITS = {"max_connections": 100, "max_connections_per_source": 100}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(*write_certificate(tmp_path_factory.mktemp("given")))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, given: TlsFiles) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    with running_front(folder, **LIMITS, certificate=linked_certificate(given, folder)) as running:
        yield running


def test_a_client_that_trusts_the_certificate_is_answered(front: Front, given: TlsFiles) -> None:
    trusted = ssl.create_default_context(cafile=given.certificate)
    with httpx.Client(verify=trusted, base_url=f"https://127.0.0.1:{front.port}") as client:
        assert client.get("/health").text == client.post("/v1/completions", json={}).text == "ab"


def test_a_client_that_does_not_trust_it_is_not(front: Front) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://127.0.0.1:{front.port}/health")


def test_neither_plain_http_nor_old_tls_is_answered(front: Front) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{front.port}/health").raise_for_status()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"https://127.0.0.1:{front.port}/health", verify=old)


def test_the_listener_for_this_machine_stays_plain(front: Front) -> None:
    assert httpx.get(f"http://127.0.0.1:{front.health_port}/health").status_code == 200


def test_renewed_files_are_read_through_the_links(tmp_path: Path, given: TlsFiles) -> None:
    linked = Path(linked_certificate(given, tmp_path))
    assert linked.read_bytes() == given.certificate.read_bytes()
    assert linked.with_name(f"{linked.name}.key").read_bytes() == given.key.read_bytes()
    renewed = TlsFiles(*write_certificate(tmp_path, "renewed"))
    assert Path(linked_certificate(renewed, tmp_path)).read_bytes() == renewed.certificate.read_bytes()


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_commands_say_what_a_certificate_of_ones_own_needs(front: Front, command: str, capsys) -> None:
    url = f"https://127.0.0.1:{front.port}"
    assert main([command, "--url", url]) == 1
    wanted = (
        f"{url}: the certificate is not trusted (self-signed certificate); SSL_CERT_FILE names a file of trusted ones"
    )
    assert wanted in capsys.readouterr().err


def test_the_chat_reads_trusted_certificates_from_the_variable(front: Front, given: TlsFiles, monkeypatch, capsys):
    monkeypatch.setenv("SSL_CERT_FILE", str(given.certificate))
    assert main(["chat", "--url", f"https://127.0.0.1:{front.port}"]) == 1
    assert "is not an OpenAI-compatible server" in capsys.readouterr().err
