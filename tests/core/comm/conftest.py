"""A store of torch.distributed, as a fixture."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def server() -> Any:
    timeout = timedelta(seconds=10)
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
