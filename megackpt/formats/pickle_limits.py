"""Checks the limits of a pickle before it is loaded.

The limits bound memory, depth and repetition: an unpickler trusts every length, and Python's own hashes and
comparisons follow nested tuples without a bound. `safe_pickle` decides which classes a pickle may name.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import TypeAlias

from megackpt.codec.containers import MAX_EQUAL_HASHES, MAX_UNCHECKED_KEYS
from megackpt.formats.pickle_values import TABLE_CLASSES, check_keys, name_in_python_3

_MODULUS = 2**61 - 1  # of the hashes of numbers; Source: sys.hash_info.modulus of 64-bit systems
_MAX_DEPTH = 500  # values of real checkpoints are nested a few dozen levels deep
_MAX_WEIGHT = 1 << 24  # values in one value, counted as often as they occur, besides a few per byte

# Opcodes by their effect on the stack, as far as the depth of values depends on it.
_MARK = ord("(")
_TUPLES = {ord(")"): 0, 0x85: 1, 0x86: 2, 0x87: 3}
_TO_MARK = frozenset(b"tldeu\x90\x91")
_APPENDS = frozenset(b"eu\x90")  # put the values above the mark into the one below
_KEYS = {
    ord("u"): 2,
    ord("d"): 2,
    0x90: 1,
    0x91: 1,
}  # which of the values above the mark are hashed: one of ...
_PUTS = frozenset(b"pqr")
_GETS = frozenset(b"ghj")
_POPS_TWO = frozenset(b"Rb\x81a")  # the lower one stays, and contains the upper one
_POP, _POP_MARK, _DUP, _APPEND, _SETITEM, _REDUCE, _BUILD, _GLOBAL = b"012asRbc"
_EMPTY = frozenset(b"]}\x8f")  # push an empty list, dict or set
_NEW_TABLES = frozenset(b"ld\x91")  # make a list, a dict or a frozenset of the values above the mark
_LONG_BYTES = 64  # as long an argument of an opcode takes notable time to copy
_UNIT_BYTES = 8  # of such an argument are counted as one value, as in a list
_MEMOIZE, _NEWOBJ, _NEWOBJ_EX, _STACK_GLOBAL = 0x94, 0x81, 0x92, 0x93


def check_opcodes(data: bytes, *, calls_make_new: bool = True) -> set[tuple[str, str]]:
    """Return the modules and names in a pickle, after checking that it is harmless to load.

    A pickle is rejected if it would change objects that it has not made. BUILD, which sets attributes, is
    allowed on an instance that the pickle itself has made, never on an object that it refers to by name (a
    class, a function, a member of an enumeration).

    A pickle is also rejected if it needs memory beyond its own size, or unbounded stack or time:

    * Numbers of the memo are sequential in an honest pickle. A forged one makes a table of 64 GiB.
    * An unpickler trusts lengths, and allocates memory before the bytes are there.
    * Tuples in tuples, 100,000 levels deep, overflow the stack when they are hashed. If each contains the
      next one twice, the hash never ends.
    * Keys of dicts and elements of sets can be chosen so that their hashes collide. If more than a few are no
      strings, `check_keys` looks at all of them.
    * A few bytes can copy a large value: an opcode that calls a function, again and again with the same list.

    Args:
        data: the pickle.
        calls_make_new: whether the result of a call counts as an instance that the pickle has made. If not,
            the caller's functions check the keys of what calls make, and instances have hashes that cannot
            be chosen.

    Raises:
        pickle.UnpicklingError: the pickle is not harmless, or incomplete.

    Source: the opcodes of Python's pickletools.
    """
    return check_pickle(data, 0, calls_make_new=calls_make_new)[0]


def check_pickle(data: bytes, begin: int, *, calls_make_new: bool) -> tuple[set[tuple[str, str]], int]:
    """Check the pickle that begins at a byte; return the names in it, and where it ends."""
    position, end = begin, len(data)
    named: set[tuple[str, str]] = set()
    numbers = NumberHashes()
    values = _StackModel(most=4 * end + _MAX_WEIGHT, calls_make_new=calls_make_new)
    # Most opcodes push a plain value; a function call for each would double the time.
    arguments, plain, stack, memo = _ARGUMENTS, _PUSH_PLAIN, values.stack, values.memo
    while position < end:
        code = data[position]
        kind = arguments.get(code)
        position += 1
        if kind is None:
            raise pickle.UnpicklingError(f"opcode {code} is unknown, or not used by Python 3")
        if code == 46:  # "."
            if values.keys > MAX_UNCHECKED_KEYS or values.makes_tables:
                check_keys(data[begin:position])
            return named, position
        start = position
        # pickletools has the length of an argument, or a negative code for the way to find it.
        if kind >= 0:
            position += kind
        elif kind == pickletools.UP_TO_NEWLINE:
            # Two lines: module and name.
            for _ in range(2 if code == _GLOBAL else 1):
                # Without the end of a line, the position is past the pickle, and the loop ends with an error.
                position = data.find(b"\n", position) + 1 or end + 1
        else:
            # The argument begins with its length.
            width = _COUNT_BYTES[kind]
            position += width + int.from_bytes(data[position : position + width], "little")
        # Shorter ones are below the modulus of hashes, and different numbers there have different hashes.
        is_long = code in _INTEGERS and position - start > 8
        if is_long and numbers.add(_integer(code, data[start:position])):
            raise pickle.UnpicklingError("integers have the same hash, as if to make this slow")
        if code in plain:
            value = plain[code]
            if position - start > _LONG_BYTES:
                value = (*value[:3], [(position - start) // _UNIT_BYTES])
            stack.append(value)
            continue
        if code in _EMPTY:
            stack.append((0, 1, _OTHER, [0]))
            continue
        if code == _GLOBAL:
            name = _name(data[start:position])
            named.add(name)
            stack.append(_TABLE_CLASS if name in TABLE_CLASSES else _PLAIN)
            continue
        if code in _NUMBERED:
            number = _number(code, data[start:position])
            if number > end:
                raise pickle.UnpicklingError("a number of the memo is larger than the pickle")
            if code in _GETS:
                stack.append(memo.get(number, _PLAIN))
            elif number > len(memo) + 1:  # Python 2 counts from 1
                raise pickle.UnpicklingError("numbers of the memo are not in sequence")
            else:
                memo[number] = stack[-1] if stack else _PLAIN
            continue
        values.take(code)
    raise pickle.UnpicklingError("the pickle has no end")


_ARGUMENTS = {ord(o.code): o.arg.n if o.arg is not None else 0 for o in pickletools.opcodes}
_ARGUMENTS[_GLOBAL] = pickletools.UP_TO_NEWLINE
for _code in b"io\x82\x83\x84":  # INST, OBJ and EXT make instances, or look up classes, by other means
    del _ARGUMENTS[_code]
_NUMBERED = _PUTS | _GETS
_INTEGERS = frozenset(b"IL\x8a\x8b")
_MAX_DIGITS = 4300  # the limit of Python itself
_COUNT_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _integer(code: int, argument: bytes) -> int:
    """Return the integer in the argument of an opcode."""
    if code in b"IL":
        digits = argument.strip().rstrip(b"L").lstrip(b"+-")
        if not digits.isdigit() or len(digits) > _MAX_DIGITS:
            raise pickle.UnpicklingError("an integer of a pickle is malformed, or too long")
        return int(digits)
    return int.from_bytes(argument[_COUNT_BYTES[_ARGUMENTS[code]] :], "little", signed=True)


def _name(argument: bytes) -> tuple[str, str]:
    """Return module and name of a GLOBAL, in the names of Python 3."""
    module, name = argument.decode("utf-8", "replace").split("\n")[:2]
    return name_in_python_3(module, name)


def _number(code: int, argument: bytes) -> int:
    """Return a number of the memo."""
    if code in b"pg":
        text = argument.strip()
        if not text.isdigit() or len(text) > 12:
            raise pickle.UnpicklingError("a number of the memo is larger than the pickle")
        return int(text)
    return int.from_bytes(argument, "little")


# Kinds of values: plain integers, as members of an enumeration would make the check slower by a third.
_OTHER = 0
_MADE = 1  # an instance that the pickle itself has made
_TEXT = 2  # a string or bytes, whose hash is salted
_TABLES = 3  # a class of dicts or sets

# What a copy of a value costs, in values. Of a container and of a long text in a list of one number, which is
# the same object wherever the value is, so that it grows with it. Of a tuple in the costs of its items. None
# for any other value.
_Cost: TypeAlias = "list[int] | tuple[_Cost, ...] | None"
_TUPLE: _Cost = ()  # to be computed from the items
_SHORT = 8  # tuples of up to so many plain values cost nothing to speak of
_COPIED_LEVELS = 3  # of tuples: the arguments of a call, arguments among these for another call, and pairs

_Value = tuple[int, int, int, _Cost]  # depth, weight, kind, cost
_PLAIN: _Value = (0, 1, _OTHER, None)
_PLAIN_TEXT: _Value = (0, 1, _TEXT, None)
_TABLE_CLASS: _Value = (0, 1, _TABLES, None)
_CALLS = frozenset((_REDUCE, _NEWOBJ, _NEWOBJ_EX))
_TEXTS = (pickletools.pyunicode, pickletools.pybytes, pickletools.pybytes_or_str)
_PUSH_PLAIN = {
    ord(o.code): _PLAIN_TEXT if o.stack_after[0] in _TEXTS else _PLAIN
    for o in pickletools.opcodes
    if not o.stack_before and len(o.stack_after) == 1 and o.code not in "()ghjc]}\x8f"
}


def _cost_of(cost: _Cost, levels: int = _COPIED_LEVELS) -> int:
    """Return how many values a call copies at most that gets a value of this cost."""
    if cost is None or levels < 0:
        return 0
    if isinstance(cost, list):
        return cost[0]
    return len(cost) + sum(_cost_of(item, levels - 1) for item in cost)


class _StackModel:
    """Follows an unpickler's stack: how deep and heavy its values are, and whether the pickle has made them.

    A container that grows after it was put into the memo counts there as it was then. That is enough, as such
    a container cannot be hashed: only values that are complete when they are made matter.

    Attributes:
        stack: the values.
        memo: values by their numbers.
        keys: how many keys of dicts and elements of sets are no strings.
        makes_tables: whether a call makes a dict or a set of something.
    """

    def __init__(self, *, most: int, calls_make_new: bool) -> None:
        self.stack: list[_Value] = []
        self.memo: dict[int, _Value] = {}
        self.keys = 0
        self.makes_tables = False
        self._most = most
        self._hashed = 0  # weight of the keys: each is hashed anew
        self._copied = 0  # values in the arguments of calls
        self._making = {_NEWOBJ, _NEWOBJ_EX, *([_REDUCE] if calls_make_new else [])}
        self._salted = {_TEXT} if calls_make_new else {_TEXT, _MADE}
        self._marks: list[int] = []

    def take(self, code: int) -> None:
        """Apply the effect of an opcode."""
        stack = self.stack
        if code == _MARK:
            self._marks.append(len(stack))
            if len(self._marks) > _MAX_DEPTH:
                raise pickle.UnpicklingError(f"values are nested more than {_MAX_DEPTH} deep")
        elif code in _TUPLES:
            count = _TUPLES[code]
            self._push(stack[len(stack) - count :] if count else [], count, cost=_TUPLE)
        elif code in _TO_MARK:
            self._take_to_mark(code)
        elif code == _MEMOIZE:
            self.memo[len(self.memo)] = stack[-1] if stack else _PLAIN
        elif code in _POPS_TWO:
            self._push(stack[-2:], 2, self._kind_of_result(code, 2), self._result_cost(code, 2))
        elif code in (_SETITEM, _NEWOBJ_EX):
            if code == _SETITEM:
                self._hash(stack[-2:-1])
            self._push(stack[-3:], 3, self._kind_of_result(code, 3), self._result_cost(code, 3))
        elif code == _STACK_GLOBAL:
            self._push([], 2, _TABLES if _REDUCE in self._making else _OTHER)
        elif code == _POP:
            # If nothing was pushed since the last mark, POP removes the mark.
            if self._marks and self._marks[-1] == len(stack):
                self._marks.pop()
            else:
                del stack[-1:]
        elif code == _POP_MARK:
            del stack[self._marks.pop() if self._marks else 0 :]
        elif code == _DUP:
            stack.append(stack[-1] if stack else _PLAIN)

    def _take_to_mark(self, code: int) -> None:
        stack = self.stack
        mark = self._marks.pop() if self._marks else 0
        inner, kind = stack[mark:], _OTHER
        if code in _KEYS:
            self._hash(inner[:: _KEYS[code]])
        if code in _APPENDS and mark:
            _, _, kind, cost = stack[mark - 1]
            _add_cost(cost, len(inner))
            inner, mark = stack[mark - 1 :], mark - 1
        else:
            cost = [len(inner)] if code in _NEW_TABLES else _TUPLE
        self._push(inner, len(stack) - mark, kind, cost)

    def _hash(self, keys: list[_Value]) -> None:
        """Count keys that an unpickler inserts.

        Raises:
            pickle.UnpicklingError: their hashes take too long, as the same large tuples are hashed again and
                again.
        """
        for _, weight, kind, _ in keys:
            if kind not in self._salted:
                self.keys += 1
                self._hashed += weight
        if self._hashed > self._most:
            raise pickle.UnpicklingError("keys are repeated without measure")

    def _kind_of_result(self, code: int, count: int) -> int:
        """Return the kind of the value that an opcode leaves of the last `count` values.

        Raises:
            pickle.UnpicklingError: the opcode would set attributes of a value that the pickle has not made.
        """
        target = self.stack[-count] if len(self.stack) >= count else _PLAIN
        if code in _CALLS:
            # Even an empty tuple of arguments weighs 1; one that weighs more may bring keys.
            if target[2] == _TABLES and self.stack[1 - count][1] > 1:
                self.makes_tables = True
                self._hash([(0, self.stack[1 - count][1], _OTHER, None)])
            return _MADE if code in self._making else _OTHER
        if code == _BUILD and target[2] != _MADE:
            raise pickle.UnpicklingError("it sets attributes (BUILD) of something that it has not made")
        return target[2]

    def _result_cost(self, code: int, count: int) -> _Cost:
        """Return the cost of the value that an opcode leaves of the last `count` values, and count a call.

        Raises:
            pickle.UnpicklingError: calls copy the same values again and again.
        """
        target, *values = self.stack[-count:] or [_PLAIN]
        copied = sum(_cost_of(value[3]) for value in values) if code not in (_APPEND, _SETITEM) else 1
        if code in _CALLS:
            cost: _Cost = [copied]
        else:
            cost = target[3]
            _add_cost(cost, copied)
        self._copied += copied
        if self._copied > self._most:
            raise pickle.UnpicklingError("calls copy the same values without measure")
        return cost

    def _push(self, parts: list[_Value], count: int, kind: int = _OTHER, cost: _Cost = None) -> None:
        """Replace the last `count` values of the stack by one that contains the parts."""
        depth = weight = 1
        is_costly = False
        for part_depth, part_weight, _, part_cost in parts:
            if part_depth >= depth:
                depth = part_depth + 1
            weight += part_weight
            if part_cost is not None:
                is_costly = True
        if cost is _TUPLE:
            long = [len(parts)] if len(parts) > _SHORT else None
            cost = tuple(part[3] for part in parts) if is_costly else long
        if depth > _MAX_DEPTH:
            raise pickle.UnpicklingError(f"values are nested more than {_MAX_DEPTH} deep")
        if weight > self._most:
            raise pickle.UnpicklingError("values are repeated in each other without measure")
        if count:
            del self.stack[-count:]
        self.stack.append((depth, weight, kind, cost))


def _add_cost(cost: _Cost, count: int) -> None:
    """Let a container, or an object that a call has made, have so many values more."""
    if isinstance(cost, list):
        cost[0] += count


class NumberHashes:
    """Counts hashes of the large integers of a pickle, which may all become keys of one dict."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, set[int]] = {}  # by hash, as bytes, whose own hashes are salted

    def add(self, number: int) -> bool:
        """Add a number; return whether more different numbers have its hash than chance allows."""
        if -_MODULUS < number < _MODULUS:  # its hash is the number itself
            return False
        same_hash = self._numbers.setdefault(hash(number).to_bytes(8, "little", signed=True), set())
        same_hash.add(number)  # the set stays small, so its comparisons are few
        return len(same_hash) > MAX_EQUAL_HASHES
