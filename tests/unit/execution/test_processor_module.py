"""Modules of logit processors that operators name: what is taken, and what each fault says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution.processor_module import digest_of, load_processors
from rayserve_moe.requests.processor_arguments import ProcessorArgument, argument_of, processed_row, row_size

HEAD = """
import jax.numpy as jnp
from rayserve_moe.decoding.logit_processors import LogitProcessor
def plus(logits_SV, rows, *, part):
    return logits_SV + rows.arguments["plus"][:, None]
"""
FAULTS = {
    "no_such_module_at_all": "",
    "cannot be loaded": "import nothing_of_this_name",
    "called LOGIT_PROCESSORS": "x = 1",
    "must define LOGIT_PROCESSORS, a list": "LOGIT_PROCESSORS = [len]",
    "the default of": HEAD + "LOGIT_PROCESSORS = [LogitProcessor(plus, {'plus': 'x'})]",
    "with names that no other one uses": HEAD + "LOGIT_PROCESSORS = [LogitProcessor(plus, {'plus': 1.0})] * 2",
    "needs arguments": HEAD + "LOGIT_PROCESSORS = [LogitProcessor(plus, {})]",
    "is not a function of arrays": HEAD
    + "LOGIT_PROCESSORS = [LogitProcessor(lambda l, r, part: l + r.arguments['y'], {'x': 1})]",
    "if logits are read": HEAD
    + "LOGIT_PROCESSORS = [LogitProcessor(lambda l, r, part: l if l.sum() > 0 else -l, {'x': 1})]",
    "keep their shape": HEAD + "LOGIT_PROCESSORS = [LogitProcessor(lambda l, r, part: l[:, :, None], {'x': 1})]",
}


def write(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


def test_a_file_and_a_name_give_the_same_processors():
    by_name = load_processors("examples.logit_processors")
    by_path = load_processors(str(Path(__file__).parents[3] / "examples" / "logit_processors.py"))
    assert [each.arguments for each in by_name] == [each.arguments for each in by_path]
    assert digest_of(by_name) == digest_of(by_path) and len(digest_of(by_name)) == 64
    assert load_processors("") == () and digest_of(()) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_module_that_cannot_be_used_is_a_wrong_setting(tmp_path: Path, fault: str):
    setting = fault if not FAULTS[fault] else write(tmp_path, FAULTS[fault])
    with pytest.raises(SettingsError, match="logit_processors"):
        load_processors(setting)


def test_another_source_than_that_of_other_hosts_is_refused(tmp_path: Path):
    setting = write(tmp_path, HEAD + "LOGIT_PROCESSORS = [LogitProcessor(plus, {'plus': 1.0})]")
    digest = digest_of(load_processors(setting))
    assert load_processors(setting, digest=digest)
    with pytest.raises(SettingsError, match="differs between this host"):
        load_processors(setting, digest="0" * 64)


def test_programs_on_disk_are_those_of_the_source(tmp_path: Path):
    """What identifies a program names no address in memory, and changes with the source."""
    text = HEAD + "LOGIT_PROCESSORS = [LogitProcessor(plus, {'plus': 1.0})]"
    one, other = repr(load_processors(write(tmp_path, text))), tmp_path / "other"
    other.mkdir()
    assert " at 0x" not in one and one == repr(load_processors(write(other, text)))
    changed = tmp_path / "changed"
    changed.mkdir()
    assert one != repr(load_processors(write(changed, f"{text}\n")))


def test_processors_need_held_samples():
    with pytest.raises(SettingsError, match="structured_output"):
        settings_from({"model_path": "x", "structured_output": False, "logit_processors": "examples.logit_processors"})


def test_a_row_has_flags_and_arguments_of_all_processors():
    sigma, ngram = argument_of("sigma", 1.5), argument_of("ngram", [3, -1])
    assert (sigma.is_float, ngram.is_float, sigma.is_list, ngram.is_list) == (True, False, False, True)
    processors = ((sigma,), (ngram,))
    assert row_size(processors) == 5 and processed_row({}, processors) is None
    row = processed_row({"ngram": [9]}, processors)
    assert row is not None and row.tolist() == [0, int(np.float32(1.5).view(np.int32)), 1, 9, -1]


WRONG = [(1.0, "x"), (1.0, True), (1.0, float("inf")), (1, 0.5), (1, 2**31), ([1], [1, 2])]


@pytest.mark.parametrize(("default", "value"), WRONG)
def test_values_of_another_kind_are_refused(default: object, value: object):
    argument = argument_of("a", default)
    assert isinstance(argument, ProcessorArgument)
    with pytest.raises(ValueError, match="`a` should be"):
        argument.bits(value)
