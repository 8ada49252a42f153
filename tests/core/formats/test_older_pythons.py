"""What an older Python pickles in another way than this one is read all the same."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint import metadata

from megackpt import FormatError
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata


class Called:
    """Is pickled as a call of getattr, which Python 3.11.0 to 3.11.3 does for members of enumerations."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return getattr, self.args


def test_members_of_enumerations_are_read_from_a_call_of_getattr() -> None:
    kinds = metadata._MEM_FORMAT_ENCODING
    stored = pickle.dumps([Called(kinds, "TORCH_PRESERVE_FORMAT")])
    assert load_metadata(stored, where="w") == [kinds.TORCH_PRESERVE_FORMAT]


@pytest.mark.parametrize(
    "args", [(metadata.Metadata, "__init__"), (metadata._MEM_FORMAT_ENCODING, "__class__"), ([], "append")]
)
def test_a_call_of_getattr_gives_nothing_else(args: tuple[Any, str]) -> None:
    with pytest.raises(FormatError):
        load_metadata(pickle.dumps([Called(*args)]), where="w")
