"""The monitor of blocked calls changes nothing that a later error says about a call."""

from __future__ import annotations

from unicoll.backend.call import Call
from unicoll.backend.ops import OPS
from unicoll.backend.wait_monitor import _Seen


def call() -> Call:
    return Call(OPS["barrier"], (), (), 10.0)


def test_a_call_without_a_site_keeps_none() -> None:
    """Errors look for the site of such a call in the thread's stack."""
    seen_call = call()
    seen = _Seen(seen_call, "", 1)
    assert not seen_call.site
    assert seen.is_of(seen_call)


def test_another_call_without_a_site_is_not_taken_for_it() -> None:
    first, second = call(), call()
    seen = _Seen(first, "", 1)
    assert not seen.is_of(second)
    _Seen(second, "", 2)
    assert not seen.is_of(second)


def test_a_call_keeps_its_own_site() -> None:
    seen_call = call()
    seen_call.site = "train.py:3"
    assert _Seen(seen_call, "other.py:4", 1).is_of(seen_call)
    assert seen_call.site == "train.py:3"
