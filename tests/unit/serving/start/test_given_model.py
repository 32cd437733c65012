"""A model on the command line becomes a Serve config; a config's file stays what it is."""

from __future__ import annotations

import argparse
import dataclasses
from functools import cache

import pytest

from rayserve_moe.cli import main
from rayserve_moe.config.load import EXPLAINED, settings_from
from rayserve_moe.config.setting_texts import sections, setting_names
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.serving.start.options import add_arguments, config_of, given_settings, help_lines, is_config
from rayserve_moe.serving.start.ports import StartError


@cache
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False)
    add_arguments(made)
    return made


def parsed(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(arguments)


def test_options_are_settings():
    options = ["--port", "9000", "--dp-size=2", "--enable-return-routed-experts", "--served-model-name", "7"]
    config = config_of(parsed("org/model", *options))
    assert config["http_options"] == {"host": "127.0.0.1", "port": 9000}
    (application,) = config["applications"]
    wanted = {"data_parallel_size": 2, "enable_return_routed_experts": True, "served_model_name": "7"}
    assert application["args"] == {"model_path": "org/model"} | wanted
    assert settings_from(application["args"]).parallel.data_parallel_size == 2


def test_every_setting_is_an_option_under_each_of_its_names():
    for names in setting_names():
        if names[0] == "model_path":
            continue
        value = settings_from({"model_path": "m"})
        default = next(
            getattr(getattr(value, section.name), field.name)
            for section in dataclasses.fields(value)
            for field in dataclasses.fields(getattr(value, section.name))
            if field.metadata.get("key", field.name) == names[0]
        )
        for name in names:
            shown = list(default) if isinstance(default, tuple) else default
            given = given_settings(parsed("m", f"--{name.replace('_', '-')}={shown}"))
            assert given == {names[0]: shown}
            assert settings_from({"model_path": "m", **given}) == value


@pytest.mark.parametrize("option", ["--model", "--model-path"])
def test_a_model_may_be_named_as_in_other_engines(option):
    assert config_of(parsed(option, "org/model")) == config_of(parsed("org/model"))


def test_a_boolean_setting_is_switched_off_as_in_vllm():
    assert given_settings(parsed("m", "--no-enable-prefix-caching")) == {"enable_prefix_caching": False}


@pytest.mark.parametrize(
    "options", [["--a", "1"], ["--port", "1", "--port", "2"], ["--dp-size=1", "--data-parallel-size=1"]]
)
def test_what_is_no_option_is_refused(options, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed("m", *options)
    assert ended.value.code == 2


@pytest.mark.parametrize("arguments", [[], ["a.yaml", "--port", "1"], ["org/model", "--model", "other"]])
def test_a_command_line_names_one_thing_to_serve(arguments):
    with pytest.raises(StartError):
        config_of(parsed(*arguments))


def test_an_unknown_option_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "trained:calculator", "--max-model-length", "5"])
    assert ended.value.code == 2 and "did you mean --max-model-len?" in capsys.readouterr().err


def test_help_has_every_setting_and_each_group(capsys):
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["serve", *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    overview, everything = shown("--help"), shown("--help=all")
    assert shown("--help=max_model_len") == "\n".join(help_lines("max_model_len")) + "\n"
    for section in sections():
        assert f"  {section.name}: " in overview
        of_group = shown(f"--help={section.name}")
        for setting in section.settings:
            flag = f"--{setting.names[0].replace('_', '-')}"
            assert flag in overview and flag in everything and flag in of_group
            assert any(flag in line for line in help_lines(setting.names[0])), "what --help=SETTING prints"


def test_help_of_no_group_names_the_groups(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help=nothing"])
    assert ended.value.code == 2 and "scheduler" in capsys.readouterr().err


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
