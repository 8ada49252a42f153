"""Transformer Engine with its own kernels, on a CUDA device: a run that is loaded goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megackpt import load, save
from megackpt.contrib.transformer_engine import fused_adam, initialise_fp8_state, sharded_state_dict
from megackpt.training.parallel import LayerStack, ParallelGroups, ParallelLayout

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
te: Any = pytest.importorskip("transformer_engine.pytorch")
recipes: Any = pytest.importorskip("transformer_engine.common.recipe")
te_optimizers: Any = pytest.importorskip("transformer_engine.pytorch.optimizers")

ONE = ParallelGroups.create(ParallelLayout())
HIDDEN, FFN, HEADS, EXPERTS, TOKENS = 128, 256, 4, 4, 64
RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}
MASTERS = {"master_weights": True}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, masters": MASTERS,
    "int16 remainders": {**MASTERS, "store_param_remainders": True},
    "bfloat16": {**MASTERS, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "float16": {**MASTERS, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "float16 masters": {**MASTERS, "master_weight_dtype": torch.float16},
    "float8": {**MASTERS, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
}


@pytest.fixture(autouse=True)
def same_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TE choose the kernels for attention whose results are the same each time."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def transformer(_: int) -> nn.Module:
    layer: nn.Module = te.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=2,
        normalization="RMSNorm",
        activation="swiglu",
        fuse_qkv_params=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        attn_input_format="sbhd",
    )
    return layer


class Experts(te.GroupedLinear):  # type: ignore[misc] # it is Any where it is not installed
    """Linear layers of experts, each for as many tokens."""

    def __init__(self) -> None:
        super().__init__(EXPERTS, HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x, [x[..., 0].numel() // EXPERTS] * EXPERTS)


MODELS: dict[str, Callable[[int], nn.Module]] = {"transformer": transformer, "experts": lambda _: Experts()}


class Run:
    """A model of two layers, its optimizer, and what is stored of them."""

    def __init__(
        self,
        model: str,
        recipe: str | None,
        options: dict[str, Any],
        *,
        seed: int,
        quantised: Literal["values", "codes"] = "values",
    ) -> None:
        torch.manual_seed(seed)
        self.recipe = RECIPES[recipe] if recipe else None
        self.quantised = quantised
        with te.quantized_model_init(enabled=quantised == "codes", recipe=self.recipe):
            self.model = LayerStack(MODELS[model], range(2), 2, ONE)
        if self.recipe is not None:
            with te.autocast(enabled=True, recipe=self.recipe):
                initialise_fp8_state(self.model, self.recipe)
        self.optimizer = te_optimizers.FusedAdam(
            self.model.parameters(), lr=0.01, weight_decay=0.1, **options
        )

    def train(self, steps: range) -> list[float]:
        """Return the loss of each step."""
        return [self._step(number) for number in steps]

    def _step(self, number: int) -> float:
        generator = torch.Generator("cuda").manual_seed(number)
        shape = (TOKENS, 2, HIDDEN)
        x, target = (
            torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_() for _ in "xy"
        )
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            output = self.model(x)
        loss = (output.float() - target.detach().float()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            # FusedAdam of TE 2.20 writes codes of delayed scaling, and keeps the transposes of older ones.
            getattr(parameter, "_reset_caches", lambda: None)()
        value: float = loss.item()
        return value

    def save(self, directory: Path) -> None:
        save(self._state(is_loading=False), directory)

    def load(self, directory: Path) -> None:
        loaded = load(self._state(is_loading=True), directory)
        fused_adam.load_sharded_state_dict(self.optimizer, loaded["optimizer"])

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        model = sharded_state_dict(self.model, ONE, quantised=self.quantised)
        optimizer = fused_adam.sharded_state_dict(self.optimizer, model, is_loading)
        return {"model": model, "optimizer": optimizer}

    def bits(self) -> dict[str, Tensor]:
        """Copies of the bytes of all parameters, moments and masters."""
        states: dict[str, Any] = dict(self.model.named_parameters())
        for number, state in enumerate(self.optimizer.state.values()):
            states |= {f"{number}.{key}": value for key, value in state.items()}
        return {
            f"{name}{part}": buffer.detach().clone().view(torch.uint8) if buffer.ndim else buffer.detach()
            for name, value in states.items()
            if isinstance(value, Tensor)
            for part, buffer in _buffers(value)
        }


def _buffers(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(value, "get_metadata"):
        yield "", value
        return
    metadata: dict[str, Any] = value.get_metadata()
    if getattr(value, "_transpose_invalid", False):  # TE makes it anew before it is used
        del metadata["data_transpose"]
    yield from ((f".{name}", part) for name, part in metadata.items() if isinstance(part, Tensor))


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names of buffers with other bits; transposes that one of the two does not have are none."""
    missing = first.keys() ^ second.keys()
    assert all(name.endswith("data_transpose") for name in missing)
    return [name for name in first.keys() - missing if not torch.equal(first[name], second[name])]


def goes_on(first: Run, second: Run, directory: Path) -> None:
    """Save the first after three steps, load it into the second, and compare two steps of both."""
    assert len(set(first.train(range(3)))) == 3
    first.save(directory)
    saved = first.bits()
    expected, expected_bits = first.train(range(3, 5)), first.bits()
    assert differing(saved, expected_bits)
    second.load(directory)
    restored = second.bits()
    assert differing(saved, restored) == []
    assert second.train(range(3, 5)) == expected
    assert differing(expected_bits, second.bits()) == []


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("model", MODELS)
def test_training_in_fp8_goes_on_bit_for_bit(tmp_path: Path, model: str, recipe: str | None) -> None:
    first, second = (Run(model, recipe, MASTERS, seed=seed) for seed in (1, 2))
    goes_on(first, second, tmp_path / "c")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_training_with_quantised_parameters_goes_on_bit_for_bit(
    tmp_path: Path, model: str, recipe: str
) -> None:
    first, second = (Run(model, recipe, MASTERS, seed=seed, quantised="codes") for seed in (1, 2))
    goes_on(first, second, tmp_path / "c")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_moments_and_masters_goes_on_bit_for_bit(tmp_path: Path, form: str) -> None:
    first, second = (Run("transformer", None, FORMS[form], seed=seed) for seed in (1, 2))
    goes_on(first, second, tmp_path / "c")
