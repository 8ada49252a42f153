"""A warning of ours fails a test; one that another package gives in its own name does not."""

from __future__ import annotations

import warnings

import pytest


@pytest.mark.parametrize(
    "module", ["megackpt.api", "models.gpt", "tests.support.states", "examples.quickstart"]
)
def test_a_warning_of_ours_is_an_error(module: str) -> None:
    with pytest.raises(FutureWarning):
        warnings.warn_explicit("soon", FutureWarning, "file.py", 1, module=module)


@pytest.mark.parametrize("module", ["transformers.models", "torch.distributed", "numpy"])
def test_a_warning_of_another_package_is_none_of_our_failures(module: str) -> None:
    with warnings.catch_warnings(record=True) as seen:  # with the filters of pyproject.toml
        warnings.warn_explicit("soon", FutureWarning, "file.py", 1, module=module)
    assert [str(w.message) for w in seen] == ["soon"]


def test_a_lost_file_is_an_error_wherever_it_is_found() -> None:
    with pytest.raises(ResourceWarning):
        warnings.warn_explicit("unclosed", ResourceWarning, "file.py", 1, module="gc")
