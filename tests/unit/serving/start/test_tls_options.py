"""Options of TLS: checked before anything starts, kept from Serve, and taken as vLLM's and SGLang's flags."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from rayserve_moe.serving.start.options import add_arguments, config_of, config_of_model
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.validation import TlsFiles, as_deployed, check_config
from tests.support.serving.certificates import write_certificate


def checked(folder: Path, **options: object):
    file = folder / "config.yaml"
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    file.write_text(yaml.safe_dump(config_of(parser.parse_args(["trained:calculator", *flags]))))
    return check_config(file)


def test_flags_name_the_files_and_serve_is_not_told(tmp_path):
    certificate, key = write_certificate(tmp_path)
    config = checked(tmp_path, ssl_certfile=certificate, ssl_keyfile=key, host="0.0.0.0")
    assert config.tls == TlsFiles(certificate, key)
    assert as_deployed(config)["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert checked(tmp_path).tls is None


def test_a_relative_path_is_of_the_directory_of_the_command(tmp_path, monkeypatch):
    certificate, key = write_certificate(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert checked(tmp_path, ssl_certfile=certificate.name, ssl_keyfile=key.name).tls == TlsFiles(certificate, key)


def test_what_cannot_serve_is_refused_with_its_files(tmp_path):
    certificate, key = write_certificate(tmp_path)
    _, other = write_certificate(tmp_path, "other")
    _, locked = write_certificate(tmp_path, "locked", password=b"secret")
    (tmp_path / "text").write_text("no certificate")
    wrong = {
        "must be given together": {"ssl_certfile": certificate},
        "No such file": {"ssl_certfile": tmp_path / "absent", "ssl_keyfile": key},
        "(?i)key values mismatch": {"ssl_certfile": certificate, "ssl_keyfile": other},
        "the key has a password": {"ssl_certfile": certificate, "ssl_keyfile": locked},
        "(?i)PEM|SSL": {"ssl_certfile": tmp_path / "text", "ssl_keyfile": key},
    }
    for message, options in wrong.items():
        with pytest.raises(StartError, match=message) as refusal:
            checked(tmp_path, **options)
        assert all(str(path) in str(refusal.value) for path in options.values() if len(options) == 2)


@pytest.mark.parametrize("name", ["ssl_keyfile_password", "ssl_ca_certs"])
def test_options_that_haproxy_is_not_given_are_refused(tmp_path, name):
    file = tmp_path / "config.yaml"
    document = config_of_model("trained:calculator", {})
    document["http_options"][name] = "x"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(StartError, match=f"{name} is not supported"):
        check_config(file)
