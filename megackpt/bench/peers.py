"""Makes the libraries to compare with, by name or by `module:class`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from megackpt.bench.contender import Contender
from megackpt.errors import DeclarationError


def make_peer(name: str) -> Contender:
    """Return the contender of a name of PEERS, or an instance of the class that `module:class` names.

    Raises:
        MissingExtraError: its library is not installed.
        DeclarationError: there is no such module or class.
    """
    if ":" in name:
        return _import_class(name)()
    if name == "dcp":
        from megackpt.bench.dcp import TorchDistributed

        return TorchDistributed()
    if name == "mcore":
        from megackpt.bench.megatron import MegatronCore

        return MegatronCore()
    from megackpt.bench.plain_torch import PlainTorch

    return PlainTorch()


def check_peers(names: Sequence[str]) -> None:
    """Raise an error for a peer given as `module:class` that cannot be imported.

    Raises:
        DeclarationError: there is no such module or class.
    """
    for name in names:
        if ":" in name:
            _import_class(name)


def _import_class(name: str) -> Callable[[], Contender]:
    module, _, attribute = name.partition(":")
    try:
        peer: Callable[[], Contender] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(
            f"The peer {name!r} cannot be imported: {error}. Give `module:class`, with the module on "
            f"PYTHONPATH."
        ) from error
    return peer
