"""Loader of the logit processors that the operator's setting names: a Python module, never code from a request."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.decoding.logit_processors import LogitProcessor, allowed_logits, processed_size
from rayserve_moe.decoding.masks import mask_words
from rayserve_moe.parallel.vocabulary_part import VocabularyPart

LISTED = "LOGIT_PROCESSORS"
_TRIED = VocabularyPart(64, 64)


@cache
def load_processors(setting: str, *, digest: str = "") -> tuple[LogitProcessor, ...]:
    """Return the processors listed by the module of a setting: a file ending in `.py`, or a module name; () if empty.

    Raises: SettingsError if the module cannot be loaded, lists anything but pure functions of arrays, or its source
        does not match `digest`, which other hosts have.
    """
    if not setting:
        return ()
    module = _module(setting)
    source = hashlib.sha256(Path(module.__file__ or "").read_bytes()).hexdigest()
    if digest and source != digest:
        raise SettingsError(f"logit_processors: the file {setting} differs between this host and the replica's")
    listed = getattr(module, LISTED, None)
    if not isinstance(listed, list | tuple) or not all(isinstance(each, LogitProcessor) for each in listed):
        raise SettingsError(f"logit_processors: {setting} must define {LISTED}, a list of LogitProcessor")
    found = tuple(replace(each, digest=source) for each in listed)
    _check(found)
    return found


def digest_of(processors: Sequence[LogitProcessor]) -> str:
    """Return the digest of the processors' source; empty without processors."""
    return processors[0].digest if processors else ""


def _module(setting: str) -> ModuleType:
    try:
        if not setting.endswith(".py"):
            return importlib.import_module(setting)
        spec = importlib.util.spec_from_file_location(Path(setting).stem, setting)
        assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, SyntaxError, ValueError, TypeError, AttributeError, NameError) as error:
        raise SettingsError(f"logit_processors: {setting} cannot be loaded: {error}") from error
    return module


def _check(processors: Sequence[LogitProcessor]) -> None:
    """Check that argument names are unique, and trace each function with the shapes of a step."""
    names = [argument.name for processor in processors for argument in processor.arguments]
    if len(set(names)) != len(names) or not all(processor.arguments for processor in processors):
        raise SettingsError("logit_processors: every processor needs arguments, with names that no other one uses")
    for processor in processors:
        sizes = ((2, 64), jnp.float32), ((2, mask_words(64)), jnp.int32), ((2, processed_size([processor])), jnp.int32)
        shapes = [jax.ShapeDtypeStruct(*each) for each in sizes]

        def run(logits: jax.Array, mask: jax.Array, given: jax.Array, one: LogitProcessor = processor) -> jax.Array:
            return allowed_logits(logits, mask, given_SX=given, processors=(one,), part=_TRIED)

        try:
            found = jax.eval_shape(run, *shapes)
        except (TypeError, ValueError, LookupError, AttributeError, jax.errors.JAXTypeError) as error:
            name, message = processor.arguments[0].name, str(error).partition("\n")[0]
            raise SettingsError(
                f"logit_processors: the processor of {name} is not a function of arrays: {message}"
            ) from error
        if (found.shape, found.dtype) != (shapes[0].shape, shapes[0].dtype):
            raise SettingsError("logit_processors: logits must keep their shape and be float32")
