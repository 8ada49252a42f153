"""docs/guarantees.md is what the list makes, and the list is right: quotes, names of tests, levels."""

from __future__ import annotations

import pytest

from tests.guarantees import EXCEPTIONS, GUARANTEES
from tests.support import guarantee_page
from tests.support.guarantee_page import (
    ALL,
    GPU,
    IN_CI,
    PAGE,
    PLAIN,
    ROOT,
    GuaranteeError,
    find_test,
    folded,
    level_of,
    levels_of,
)


def test_the_page_of_guarantees_is_what_the_list_makes() -> None:
    assert PAGE.read_text() == guarantee_page.page(GUARANTEES, EXCEPTIONS), "run: python -m tests.guarantees"


@pytest.mark.parametrize("page", GUARANTEES)
def test_each_quote_stands_in_its_page_word_for_word(page: str) -> None:
    text = folded((ROOT / page).read_text())
    assert [quote for quote in GUARANTEES[page] if quote not in text] == []


def test_no_quote_or_test_is_listed_twice() -> None:
    quotes = [quote for quotes in GUARANTEES.values() for quote in quotes]
    assert len(quotes) == len(set(quotes))
    assert [
        q for page in GUARANTEES.values() for q, names in page.items() if len(names) > len(set(names))
    ] == []


@pytest.mark.parametrize("page", GUARANTEES)
def test_each_guarantee_has_a_test_in_ci_or_a_reason_why_not(page: str) -> None:
    without = {quote for quote, names in GUARANTEES[page].items() if not IN_CI.intersection(levels_of(names))}
    assert without == GUARANTEES[page].keys() & EXCEPTIONS.keys()


@pytest.mark.parametrize("command", [PLAIN, ALL, GPU])
def test_a_command_of_pytest_collects_the_tests_of_its_rows(
    command: str, pytestconfig: pytest.Config
) -> None:
    of_newcomers: list[str] = pytestconfig.getini("testpaths")
    collected = of_newcomers if command == PLAIN else command.split()[-1:]
    folders = tuple(f"{folder}/" for folder in collected)
    names = {name for quotes in GUARANTEES.values() for tests in quotes.values() for name in tests}
    tests = [test for test in map(find_test, names) if level_of(test) == command]
    assert [test for test in tests if not test.path.startswith(folders)] == []


def test_each_exception_belongs_to_a_guarantee() -> None:
    assert EXCEPTIONS.keys() <= {quote for quotes in GUARANTEES.values() for quote in quotes}


def test_a_name_that_no_function_has_or_several_have_is_an_error() -> None:
    with pytest.raises(GuaranteeError, match=r"test_of_nothing: no file of tests/ has such a function"):
        find_test("test_of_nothing")
    name = "test_any_layout_loads_what_any_other_saved"
    with pytest.raises(GuaranteeError, match=rf"{name}: tests/.*, tests/.* have .* Write file.py::{name}"):
        find_test(name)
    assert find_test(f"test_law.py::{name}").path == "tests/core/engine/test_law.py"
    with pytest.raises(GuaranteeError, match="no file"):
        find_test(f"law.py::{name}")
