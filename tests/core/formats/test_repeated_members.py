"""A member of an unknown enumeration is written once, however often a state has it."""

from __future__ import annotations

from megackpt.codec import ForeignMember, keep_unknown_values
from megackpt.formats.safe_pickle import load_value, save_value


def test_a_member_that_is_in_a_state_ten_thousand_times_is_written_once() -> None:
    member = ForeignMember("someones_library", "Mode", None, 1)
    with keep_unknown_values():
        single, many = (save_value([member] * count, path="w") for count in (1, 10_000))
        loaded = load_value(many, where="w")
    assert len(many) - len(single) < 5 * 10_000  # a member alone has some forty bytes
    assert [(member.qualname, member.args) for member in loaded] == [("Mode", (1,))] * 10_000
