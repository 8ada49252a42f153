"""Any value in any document of a checkpoint, digests fitting: an error of ours, or a load.

Without fitting digests, `tests/system/faults/test_corruption.py` asks for more: what was saved, or an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.system.attacks.mutation import Files, checkpoint, mutated, outcome

EXAMPLES = 50
BACKENDS = [("megackpt", 1), ("torch_dist", 1), ("zarr", 1), ("zarr", 3)]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda b: f"{b[0]}-{b[1]}")
def files(request: pytest.FixtureRequest) -> Files:
    return checkpoint(request.param)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_hostile_value_leads_to_an_error_of_ours_or_to_a_load(files: Files, data: st.DataObject) -> None:
    choose: Callable[[int], int] = lambda subdirectory: data.draw(st.integers(0, subdirectory - 1))  # noqa: E731
    outcome(mutated(files, choose), {})
