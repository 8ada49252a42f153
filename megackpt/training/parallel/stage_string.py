"""Parser of Megatron's pipeline layout strings, such as `Ettt|(tt|)*29,m|L`.

Expands repetitions and checks letters. What the stages mean is decided in `stages`.
"""

from __future__ import annotations

from typing import NoReturn

from megackpt.errors import DeclarationError

LETTERS = {"E": "embedding", "t": "transformer layer", "m": "MTP layer", "L": "loss"}
MAX_LETTERS = 1 << 16
"""A longer string, repetitions expanded, is taken for a slip of the pen."""
MAX_DEPTH = 20
"""Deeper nested parentheses likewise."""


def parse_stages(text: str) -> tuple[str, ...]:
    """Return the letters of each stage of a layout string, without repetitions. Pure.

    >>> parse_stages("Et*2|(t|)*2,L")
    ('Ett', 't', 't', 'L')

    Raises:
        DeclarationError: an unknown letter, an unbalanced parenthesis, or a repetition without a number, each
            with its position; E is not exactly the first letter, or L not exactly the last one.

    Source: Megatron-Core `PipelineParallelLayerLayout.parse_str_to_list` and `validate_layer_layout`. Nested
    parentheses, which that misreads, are allowed.
    """
    letters = _Parser(text).parse()
    order = letters.replace("|", "")
    for letter, at, where in (("E", 0, "first"), ("L", -1, "last")):
        if order.count(letter) != 1 or order[at] != letter:
            raise DeclarationError(
                f"{text!r} has {order.count(letter)} times the {LETTERS[letter]} ({letter}); it must be "
                f"there once, as the {where} letter. Write a layout such as 'Ett|tt|ttL'."
            )
    return tuple(letters.split("|"))


class _Parser:
    """A parser by recursive descent: `items = (letter | "|" | "(" items ")") ["*" number] ...`."""

    def __init__(self, text: str) -> None:
        self.text = text
        # Commas are for reading. Positions are those in the text, for errors.
        self.characters = [(at, c) for at, c in enumerate(text) if c != ","]
        self.next = 0
        self.depth = 0

    def parse(self) -> str:
        """Return all letters and bars, repetitions expanded."""
        letters = self._items()
        if self._peek() == ")":
            self._fail("a ) without its (. Remove it, or add the other one")
        return letters

    def _items(self) -> str:
        letters = ""
        while self._peek() not in ("", ")"):
            letters += self._item()
            if len(letters) > MAX_LETTERS:
                raise DeclarationError(
                    f"{self.text!r} has more than {MAX_LETTERS} letters, repetitions expanded. Correct the "
                    f"numbers after *."
                )
        return letters

    def _item(self) -> str:
        character = self._peek()
        if character == "(":
            return self._group()
        if character != "|" and character not in LETTERS:
            known = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
            self._fail(f"{character!r}, which is no letter of a layout. Use {known}, |, parentheses and *")
        self.next += 1
        return self._repeat(character) if self._peek() == "*" else character

    def _group(self) -> str:
        opening = self.next
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail(f"the {self.depth}th ( that is open. Nest at most {MAX_DEPTH}")
        self.next += 1
        letters = self._items()
        self.depth -= 1
        if self._peek() != ")":
            self.next = opening
            self._fail("a ( without its ). Add it, with a number of repetitions: (tt|)*3")
        self.next += 1
        if self._peek() != "*":
            self.next = opening
            self._fail("parentheses without a number of repetitions. Write (tt|)*3")
        return self._repeat(letters)

    def _repeat(self, letters: str) -> str:
        star = self.next
        self.next += 1
        digits = ""
        while self._peek().isdecimal():
            digits += self._peek()
            self.next += 1
        if not digits:
            self.next = star
            self._fail("a * without a number. Write t*3 or (tt|)*3")
        # One letter more than allowed is enough to find out.
        count = min(int(digits[:9]), MAX_LETTERS // max(1, len(letters)) + 1)
        return letters * count

    def _peek(self) -> str:
        return self.characters[self.next][1] if self.next < len(self.characters) else ""

    def _fail(self, what: str) -> NoReturn:
        at = self.characters[self.next][0]
        raise DeclarationError(f"layout {self.text!r} has at position {at} {what}.")
