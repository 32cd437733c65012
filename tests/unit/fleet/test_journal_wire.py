"""Frames of the journal: what holds no message ends the connection and nothing else."""

from __future__ import annotations

import pytest

from rayserve_moe.fleet.journal_wire import message_in, packed


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x01", b"\x92\x01", b"\x80"])
def test_a_frame_that_holds_no_message_ends_the_connection(body: bytes) -> None:
    with pytest.raises(ConnectionError, match="holds no message"):
        message_in(body)


def test_a_message_comes_back_as_it_was_packed() -> None:
    assert message_in(packed([1, "a", [b"x"]])) == [1, "a", [b"x"]]
