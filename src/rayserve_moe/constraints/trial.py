"""A process that tries grammars, so that one that takes too long can be ended: building cannot be cancelled.

It reads a vocabulary, its bytes as Latin-1, then grammars, and answers each with its fault, as lines of JSON. It ends
with its input.
"""

from __future__ import annotations

import json
import os
import sys

from rayserve_moe.constraints.matchers import Vocabulary, built_matcher, fault_of

NICE = 10
"""How far it stands back behind the process that serves."""


def main() -> None:
    """Try what comes in."""
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
