"""A model on the command line becomes a Serve config; a config's file stays what it is."""

from __future__ import annotations

import pytest

from rayserve_moe.cli import main
from rayserve_moe.config.load import EXPLAINED, settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.serving.start.command import config_of_model, is_config
from rayserve_moe.serving.start.ports import StartError


def test_options_are_settings():
    options = ["--port", "9000", "--dp-size=2", "--enable-return-routed-experts", "--served-model-name", "m"]
    config = config_of_model("org/model", options)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 9000}
    (application,) = config["applications"]
    wanted = {"model_path": "org/model", "dp_size": 2, "enable_return_routed_experts": True, "served_model_name": "m"}
    assert application["args"] == wanted
    assert settings_from(application["args"]).parallel.data_parallel_size == 2


@pytest.mark.parametrize("options", [["port"], ["--"], ["--a", "1", "--a", "2"], ["--model-path", "x"], ["--a", "{"]])
def test_what_is_no_option_is_refused(options):
    with pytest.raises(StartError):
        config_of_model("m", options)


def test_files_are_configs(tmp_path):
    file = tmp_path / "served"
    assert is_config("absent.yaml") and not is_config("org/model") and not is_config(str(tmp_path))
    file.write_text("x")
    assert is_config(str(file))


@pytest.mark.parametrize("name", EXPLAINED)
def test_names_of_other_engines_are_explained(name):
    with pytest.raises(SettingsError, match=r"heads|experts|layers"):
        settings_from({"model_path": "m", name: 2})


@pytest.mark.parametrize("name", EXPLAINED)
def test_nothing_needs_to_be_explained_of_a_single_device(name):
    alone = {"model_path": "m", name: 1}
    assert settings_from(alone) == settings_from({"model_path": "m"})
    for several in ({"devices_per_host": 2}, {"num_hosts": 2}, {"tpu_topology": "2x4", "tpu_version": "v6e"}):
        with pytest.raises(SettingsError, match=r"heads|experts|layers"):
            settings_from(alone | several)


def test_a_config_takes_no_options(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "a.yaml"), "--port", "1"]) == 1
    assert "put settings into the config" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("rayserve-moe ")
