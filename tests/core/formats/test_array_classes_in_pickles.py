"""A pickle that asks for an array of another class than numpy's own is an error, and never such an object."""

from __future__ import annotations

import io

import pytest
import torch

from megackpt import FormatError
from megackpt.formats.safe_pickle import load_value


def archive(pickled: bytes) -> bytes:
    """What torch.save writes around a pickle."""
    out = io.BytesIO()
    writer = torch.PyTorchFileWriter(out)
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_end_of_file()
    return out.getvalue()


@pytest.mark.parametrize("name", [b"ccollections\nOrderedDict\n", b"ctorch\nSize\n"])
def test_an_array_of_an_allowed_class_that_is_no_array_is_an_error(name: bytes) -> None:
    arguments = name + b"K\x00\x85U\x01b\x87"  # (class, (0,), "b")
    pickled = b"\x80\x02cnumpy._core.multiarray\n_reconstruct\n" + arguments + b"R."
    with pytest.raises(FormatError, match="an array of numpy of class"):
        load_value(archive(pickled), where="the file")
