"""Process that tries grammars: compilation cannot be cancelled, but a process can be ended.

It reads a vocabulary (bytes as Latin-1), then grammars, and answers each with its fault, all as JSON lines. It ends at
the end of its input.
"""

from __future__ import annotations

import json
import os
import sys

from rayserve_moe.constraints.matchers import Vocabulary, built_matcher, fault_of

NICE = 10
"""Niceness relative to the serving process."""


def main() -> None:
    """Try the grammars of standard input."""
    os.nice(NICE)
    written, special_ids, eos_ids = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary(tuple(each.encode("latin-1") for each in written), tuple(special_ids), tuple(eos_ids))
    tokens = vocabulary.tokens()
    _answer(["ready"])
    for line in sys.stdin:
        fault = fault_of(built_matcher(tokens, json.loads(line)), mask_words=vocabulary.mask_words)
        _answer(fault)
        del fault


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
