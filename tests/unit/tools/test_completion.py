"""Completion scripts: bash's is run, the others have every command and option, and quote what they must."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rayserve_moe.cli import COMMANDS, main
from rayserve_moe.tools.completion import SHELLS

SHELL_COMMAND = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}


@pytest.fixture
def script(capsys):
    def of(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return of


def completed(script: str, *words: str) -> set[str]:
    """Return what bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _rayserve_moe\n"
    asked += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_values(script):
    text, program = script("bash"), "rayserve-moe"
    assert completed(text, program, "") == {*COMMANDS, "completion"}
    assert completed(text, program, "co") == {"compile-check", "completion"}
    assert {"--max-model-len", "--model", "--mem-fraction"} <= completed(text, program, "serve", "--m")
    assert completed(text, program, "chat", "--u") == {"--url"}
    assert completed(text, program, "bench", "--backend", "openai-") == {"openai-chat"}
    assert completed(text, program, "completion", "") == {*SHELLS, "-h", "--help"}
    assert completed(text, program, "serve", "--tensor-par") == set()  # explained when used, and not offered


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_every_command_and_reads_its_script(script, tmp_path, shell):
    text = script(shell)
    for command in COMMANDS:
        assert command in text
    assert "max-model-len" in text and "percentile-metrics" in text
    if program := shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(text)
        subprocess.run([program, *SHELL_COMMAND[shell][1:], str(file)], check=True, timeout=60)


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2 and "bash" in capsys.readouterr().err
