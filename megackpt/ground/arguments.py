"""Checks of single arguments: the kind and range of a value, and the text of the error.

An error says what was given, and what to give. Checks that concern several arguments are in the classes of
options.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from numbers import Real

from megackpt.errors import DeclarationError

MOST_SECONDS = 1e9
"""About 30 years; longer waits overflow the clocks of other libraries."""

MOST = 1 << 62
"""Larger counts could overflow 64-bit integers."""


def check_count(name: str, value: object, *, least: int = 1, most: int = MOST, otherwise: str = "") -> None:
    """Check a count, for example of bytes or steps; a bool is not a count. Local, pure.

    otherwise says what else can be given.

    Raises:
        DeclarationError: value is not an int, or out of range.

    >>> check_count("threads", 4)
    >>> check_count("threads", 0)
    Traceback (most recent call last):
        ...
    megackpt.errors.DeclarationError: threads is 0; give an int of at least 1.
    """
    if type(value) is not int or value < least:
        raise DeclarationError(f"{name} is {value!r}; give an int of at least {least}{otherwise}.")
    if value > most:
        raise DeclarationError(f"{name} is {value!r}; give an int from {least} to {most}{otherwise}.")


def check_number(
    name: str, value: object, *, most: float = math.inf, otherwise: str = "", may_be_0: bool = False
) -> None:
    """Check a number that is finite and above 0, or 0 if `may_be_0`. Local, pure.

    Raises:
        DeclarationError: value is not a number, or out of range.
    """
    least = "of at least 0" if may_be_0 else "above 0"
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (0 < number < math.inf or (may_be_0 and number == 0)):  # nan is neither
        raise DeclarationError(f"{name} is {value!r}; give a finite number {least}{otherwise}.")
    if number > most:
        raise DeclarationError(f"{name} is {value!r}; give a number {least} and up to {most:g}{otherwise}.")


def check_seconds(name: str, value: object, *, otherwise: str = "") -> None:
    """Check a time in seconds: above 0, and at most `MOST_SECONDS`. Local, pure.

    Raises:
        DeclarationError: value is not a number, or out of range.
    """
    check_number(name, value, most=MOST_SECONDS, otherwise=otherwise)


def check_flag(name: str, value: object) -> None:
    """Check a switch. Local, pure.

    Raises:
        DeclarationError: value is neither True nor False; text such as "no" would count as true.
    """
    if not isinstance(value, bool):
        raise DeclarationError(f"{name} is {value!r}; give True or False.")


def check_flags(**flags: object) -> None:
    """Check switches, given by name. Local, pure.

    Raises:
        DeclarationError: one of them is neither True nor False.
    """
    for name, value in flags.items():
        check_flag(name, value)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Check that a value is one of some words. Local, pure.

    Raises:
        DeclarationError: value is another one.
    """
    if not isinstance(value, str) or value not in choices:
        raise DeclarationError(f"{name}={value!r} is not known. Give one of {', '.join(choices)}.")


def check_text(name: str, value: object, *, otherwise: str = "") -> None:
    """Check text that is not empty. Local, pure.

    Raises:
        DeclarationError: value is empty, or not text.
    """
    if not isinstance(value, str) or not value:
        raise DeclarationError(f"{name} is {value!r}; give text that is not empty{otherwise}.")


def check_texts(name: str, value: object, *, example: str) -> None:
    """Check a tuple of texts; a single text would be taken for its letters. Local, pure.

    Raises:
        DeclarationError: value is anything else.
    """
    if not isinstance(value, tuple) or not all(isinstance(text, str) and text for text in value):
        raise DeclarationError(f"{name} is {value!r}; give a tuple of texts, as {example}.")


def check_kind(
    name: str, value: object, kind: type | tuple[type, ...], *, give: str, optional: bool = False
) -> None:
    """Check the class of an argument; None passes if it is optional. Pure.

    give says in the error what to give.

    Raises:
        DeclarationError: value is of another class.
    """
    if isinstance(value, kind) or (optional and value is None):
        return
    raise DeclarationError(f"{name} is {_shortened(value)}; give {give}.")


def checked_step(value: object) -> int:
    """Return the number of a step as an int; integers of numpy and torch are converted. Local, pure.

    Raises:
        DeclarationError: value is not a whole number, or below 0.

    >>> checked_step(100)
    100
    """
    try:
        step = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # torch's, of a tensor of several elements, or of floats
        step = None
    if step is None or not 0 <= step <= MOST:
        raise DeclarationError(f"step is {_shortened(value)}; steps are counted from 0, in whole numbers.")
    return step


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}... (a {type(value).__name__})"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a question that names the most similar of some names, to end an error's text; or nothing.

    >>> did_you_mean("torchdist", ["zarr", "torch_dist"]), did_you_mean("x", ["zarr"])
    (" Did you mean 'torch_dist'?", '')
    """
    similar = get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {similar[0]!r}?" if similar else ""
