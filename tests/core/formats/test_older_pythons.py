"""What an older Python pickles in another way than this one is read all the same."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint import metadata

from megackpt import FormatError
from megackpt.contrib.transformer_engine.extra_state import _format_name
from megackpt.formats.tensor_pickle import load_tensor_pickle
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata


class Called:
    """Is pickled as a call of getattr, which Python 3.11.0 to 3.11.3 does for members of enumerations."""

    def __init__(self, *args: Any, state: Any = None) -> None:
        self.args = args, *([] if state is None else [state])

    def __reduce__(self) -> Any:
        return getattr, *self.args


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


def test_the_attributes_of_a_member_cannot_be_changed() -> None:
    kinds = metadata._MEM_FORMAT_ENCODING
    member = kinds.TORCH_PRESERVE_FORMAT
    before = dict(vars(member))
    stored = pickle.dumps([Called(kinds, member.name, state={"_value_": 99})])
    with pytest.raises(FormatError):
        load_metadata(stored, where="w")
    assert vars(member) == before


class Format(enum.Enum):
    """Stands for the one of Transformer Engine."""

    HYBRID = (448, 57344)


OF_FORMAT = (__name__, "Format")


@pytest.mark.parametrize("stored", [Format.HYBRID, Called(Format, "HYBRID")], ids=["by value", "by name"])
def test_a_format_of_transformer_engine_has_its_name_either_way(stored: Any) -> None:
    (member,) = load_tensor_pickle(pickle.dumps([stored]), [OF_FORMAT], where="w")
    assert (member.of, _format_name(member)) == (OF_FORMAT, "HYBRID")


@pytest.mark.parametrize("args", [([], "append"), ({}, "update"), ("text", "format")])
def test_a_call_of_getattr_in_a_pickle_of_tensors_gives_nothing_else(args: tuple[Any, str]) -> None:
    with pytest.raises(FormatError, match="getattr for something that is no class"):
        load_tensor_pickle(pickle.dumps([Called(*args)]), [OF_FORMAT], where="w")
