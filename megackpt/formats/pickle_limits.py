"""Limits of what a pickle, and the zip file around it, may claim and do, checked before either is loaded.

They bound memory, depth and repetition: an unpickler trusts every length, and Python's own hashes and
comparisons follow nested tuples without a bound. Which classes a pickle may name is decided in `safe_pickle`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

from megackpt.codec.hashes import NumberHashes

_MAX_DEPTH = 500  # values of real checkpoints are nested a few dozen levels deep
_MAX_WEIGHT = 1 << 24  # values in one value, counted as often as they occur, besides a few per byte
_ZIP = b"PK\3\4"

# Opcodes by their effect on the stack, as far as the depth of values depends on it.
_MARK = ord("(")
_TUPLES = {ord(")"): 0, 0x85: 1, 0x86: 2, 0x87: 3}
_TO_MARK = frozenset(b"tldeuoi\x90\x91")
_APPENDS = frozenset(b"eu\x90")  # put the values above the mark into the one below
_PUTS = frozenset(b"pqr")
_GETS = frozenset(b"ghj")
_POPS_TWO = frozenset(b"Rb\x81a")  # the lower one stays, and contains the upper one
_POP, _POP_MARK, _DUP, _SETITEM, _REDUCE, _BUILD, _GLOBAL = b"012sRbc"
_MEMOIZE, _NEWOBJ, _NEWOBJ_EX, _STACK_GLOBAL = 0x94, 0x81, 0x92, 0x93


def check_opcodes(data: bytes, *, calls_make_new: bool = True) -> set[tuple[str, str]]:
    """Return the modules and names in a pickle, after checking that it is harmless to load.

    A pickle is rejected if it would change objects that it has not made: BUILD, which sets attributes, is
    allowed on an instance that the pickle itself has made, never on what it refers to by name (a class, a
    function, a member of an enumeration). calls_make_new says whether the result of a call counts as such an
    instance.

    It is also rejected if it needs memory beyond its own size, or unbounded stack or time. Numbers of the
    memo are sequential in an honest pickle, but a forged one makes a table of 64 GiB, and an unpickler trusts
    lengths before the bytes are there. Tuples in tuples, 100,000 levels deep or each twice in the next, end
    the process when they are hashed, or never.

    Raises:
        pickle.UnpicklingError: the pickle is not harmless, or incomplete.

    Source: the opcodes of Python's pickletools.
    """
    position, end = 0, len(data)
    named: set[tuple[str, str]] = set()
    numbers = NumberHashes()
    values = _StackModel(most=4 * end + _MAX_WEIGHT, calls_make_new=calls_make_new)
    # Most opcodes push a plain value; a function call for each would double the time.
    arguments, plain, stack = _ARGUMENTS, _PUSH_PLAIN, values.stack
    while position < end:
        code = data[position]
        kind = arguments.get(code)
        position += 1
        if kind is None:
            raise pickle.UnpicklingError(f"unknown opcode {code}")
        if code == 46:  # "."
            return named
        begin = position
        if kind >= 0:
            position += kind
        elif kind == pickletools.UP_TO_NEWLINE:
            # Two lines: module and name.
            for _ in range(2 if code in b"ci" else 1):
                position = data.find(b"\n", position) + 1 or end + 1
        else:
            # The argument begins with its length.
            width = _COUNT_BYTES[kind]
            position += width + int.from_bytes(data[position : position + width], "little")
        is_long = code in _INTEGERS and position - begin > 8
        if is_long and numbers.add(_integer(code, data[begin:position])):
            raise pickle.UnpicklingError("integers have the same hash, as if to make this slow")
        if code in plain:
            stack.append(_PLAIN)
            continue
        if code == _GLOBAL:
            named.add(_name(data[begin:position]))
        if code in _NUMBERED:
            number = _number(code, data[begin:position])
            if number > end:
                raise pickle.UnpicklingError("a number of the memo is larger than the pickle")
            values.number = number
        values.take(code)
    raise pickle.UnpicklingError("the pickle has no end")


_ARGUMENTS = {ord(o.code): o.arg.n if o.arg is not None else 0 for o in pickletools.opcodes}
_ARGUMENTS |= {ord(code): pickletools.UP_TO_NEWLINE for code in "ci"}
_NUMBERED = _PUTS | _GETS
_PUSH_PLAIN = frozenset(
    ord(o.code)
    for o in pickletools.opcodes
    if not o.stack_before and len(o.stack_after) == 1 and o.code not in "()ghjc"
)
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
    if (module, name) in NAME_MAPPING:
        return NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name


def _number(code: int, argument: bytes) -> int:
    """Return a number of the memo."""
    if code in b"pg":
        text = argument.strip()
        if not text.isdigit() or len(text) > 12:
            raise pickle.UnpicklingError("a number of the memo is larger than the pickle")
        return int(text)
    return int.from_bytes(argument, "little")


class _StackModel:
    """Follows an unpickler's stack: how deep and heavy its values are, and whether the pickle has made them.

    A container that grows after it was put into the memo counts there as it was then. That is enough, as such
    a container cannot be hashed: only values that are complete when they are made matter.
    """

    def __init__(self, *, most: int, calls_make_new: bool) -> None:
        self.number = 0  # the argument of an opcode that reads or writes the memo
        self._most = most
        self._making = {_NEWOBJ, _NEWOBJ_EX, *([_REDUCE] if calls_make_new else [])}
        self.stack: list[_Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Value] = {}

    def take(self, code: int) -> None:
        """Apply the effect of an opcode."""
        stack = self.stack
        if code in _PUTS:
            self._memo[self.number] = stack[-1] if stack else _PLAIN
        elif code in _GETS:
            stack.append(self._memo.get(self.number, _PLAIN))
        elif code == _MARK:
            self._marks.append(len(stack))
            if len(self._marks) > _MAX_DEPTH:
                raise pickle.UnpicklingError(f"values are nested more than {_MAX_DEPTH} deep")
        elif code in _TUPLES:
            count = _TUPLES[code]
            self._push(stack[len(stack) - count :] if count else [], count)
        elif code in _TO_MARK:
            mark = self._marks.pop() if self._marks else 0
            inner, is_new = stack[mark:], False
            if code in _APPENDS and mark:
                inner, mark, is_new = stack[mark - 1 :], mark - 1, stack[mark - 1][2]
            self._push(inner, len(stack) - mark, is_new)
        elif code == _GLOBAL:
            stack.append(_PLAIN)
        elif code == _MEMOIZE:
            self._memo[len(self._memo)] = stack[-1] if stack else _PLAIN
        elif code in _POPS_TWO:
            self._push(stack[-2:], 2, self._is_new(code, 2))
        elif code in (_SETITEM, _NEWOBJ_EX):
            self._push(stack[-3:], 3, self._is_new(code, 3))
        elif code == _STACK_GLOBAL:
            self._push([], 2)
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

    def _is_new(self, code: int, count: int) -> bool:
        """Return whether the pickle has made the value that an opcode leaves of the last `count` values.

        Raises:
            pickle.UnpicklingError: the opcode would set attributes of a value that the pickle has not made.
        """
        if code in _CALLS:
            return code in self._making
        target = self.stack[-count] if len(self.stack) >= count else _PLAIN
        if code == _BUILD and not target[2]:
            raise pickle.UnpicklingError("it sets attributes (BUILD) of something that it has not made")
        return target[2]

    def _push(self, parts: list[_Value], count: int, is_new: bool = False) -> None:
        """Replace the last `count` values of the stack by one that contains the parts."""
        depth = weight = 1
        for part_depth, part_weight, _ in parts:
            depth = max(depth, part_depth + 1)
            weight += part_weight
        if depth > _MAX_DEPTH:
            raise pickle.UnpicklingError(f"values are nested more than {_MAX_DEPTH} deep")
        if weight > self._most:
            raise pickle.UnpicklingError("values are repeated in each other without measure")
        if count:
            del self.stack[-count:]
        self.stack.append((depth, weight, is_new))


_Value = tuple[int, int, bool]  # depth, weight, and whether it is an instance that the pickle has made
_PLAIN: _Value = (0, 1, False)
_CALLS = frozenset((_REDUCE, _NEWOBJ, _NEWOBJ_EX))


def check_archive(data: bytes | memoryview) -> set[tuple[str, str]]:
    """Return the modules and names in a file of torch.save, after checking the zip records.

    torch.save never writes records that are compressed or listed twice, or share bytes, so these are errors.
    A file that is not a zip file, as old versions of torch wrote, is left to torch's own unpickler.

    Raises:
        pickle.UnpicklingError: the file has such records, or a pickle that `check_opcodes` rejects.
    """
    if bytes(data[:4]) != _ZIP:
        return set()
    named: set[tuple[str, str]] = set()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
            if any(r.compress_type != zipfile.ZIP_STORED or r.compress_size != r.file_size for r in records):
                raise pickle.UnpicklingError("a record of the zip file is compressed")
            if sum(record.file_size for record in records) > len(data):
                raise pickle.UnpicklingError("records of the zip file lie on each other, or outside of it")
            if len({record.filename for record in records}) < len(records):
                raise pickle.UnpicklingError("a record of the zip file stands twice in it")
            for record in records:
                if record.filename.endswith("/data.pkl"):
                    named |= check_opcodes(archive.read(record))
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise pickle.UnpicklingError(f"no whole zip file ({error})") from error
    return named
