"""What identifies a model: nothing else may have its fingerprint, and every process must find the same one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import nn

from harness_ext.engine.fingerprint import model_fingerprint

FINGERPRINT_OF_ADAPTED = "import test_fingerprint as tests; print(tests.model_fingerprint(tests.adapted(**tests.MANY)))"
MANY = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}


def adapted(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | options
    with warnings.catch_warnings():
        # peft asks transformers for a property that it is about to rename.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(**settings))


def all_different(prints: list[str | None]) -> bool:
    return None not in prints and len(set(prints)) == len(prints)


def test_it_is_of_the_weights_not_of_the_name() -> None:
    first, second = tiny_model("gpt2"), tiny_model("gpt2")
    second.config._name_or_path = "somewhere/else"
    assert model_fingerprint(first) == model_fingerprint(second)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mamba"])
def test_one_bit_of_any_weight(family: str) -> None:
    model = tiny_model(family)
    before = model_fingerprint(model)
    for weight in model.parameters():
        bits = weight.detach().view(torch.int32).flatten()
        place = int(bits.numel() // 2)
        bits[place] ^= 1
        assert model_fingerprint(model) != before
        bits[place] ^= 1
    assert model_fingerprint(model) == before


def test_dtype_autocast_attention_and_config() -> None:
    model = tiny_model("llama")
    prints = [model_fingerprint(model), model_fingerprint(model, autocast_dtype=torch.bfloat16)]
    prints += [model_fingerprint(tiny_model("llama", dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    model.config._attn_implementation = "eager"
    prints.append(model_fingerprint(model))
    model.config.rms_norm_eps = 1e-3
    prints.append(model_fingerprint(model))
    assert all_different(prints)


def test_weights_that_only_change_places() -> None:
    model = tiny_model("llama")
    before = model_fingerprint(model)
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    first.weight.data, second.weight.data = second.weight.data, first.weight.data
    assert model_fingerprint(model) != before


def test_adapters() -> None:
    model = adapted()
    prints = [
        model_fingerprint(tiny_model("llama")),
        model_fingerprint(model),
        model_fingerprint(adapted(lora_alpha=32)),
    ]
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name)[0, 0] += 1e-6
    prints.append(model_fingerprint(model))
    assert all_different(prints)


def test_which_adapter_is_active() -> None:
    model = adapted()
    peft = pytest.importorskip("peft")
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    prints = [model_fingerprint(model)]
    model.set_adapter("second")
    prints.append(model_fingerprint(model))
    with model.disable_adapter():
        prints.append(model_fingerprint(model))
    assert all_different(prints)
    model.set_adapter("default")
    assert model_fingerprint(model) == prints[0]


def test_another_process_finds_the_same() -> None:
    """peft keeps the names of its modules as a set, which prints in an order of its own in each process."""
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
    expected = model_fingerprint(adapted(**MANY))
    done = subprocess.run(
        [sys.executable, "-c", FINGERPRINT_OF_ADAPTED],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONHASHSEED": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == expected


class Codes(torch.Tensor):
    """A quantised weight as libraries make them: no memory of its own, all of it in other tensors."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Codes:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(str(func))


class Quantised(nn.Module):
    def __init__(self, *weights: list[int]) -> None:
        super().__init__()
        self.config = tiny_model("gpt2").config
        for number, weight in enumerate(weights):
            codes = Codes(torch.tensor(weight, dtype=torch.int8))
            self.register_parameter(f"w{number}", nn.Parameter(codes, requires_grad=False))


def test_wrapped_tensors_are_told_apart() -> None:
    """All of them have the address 0, so that tied weights and these must not be confused."""
    models = [
        Quantised([1, 2], [3, 4]),
        Quantised([1, 2], [3, 5]),
        Quantised([1, 2], [1, 2]),
        Quantised([3, 4], [1, 2]),
    ]
    assert all_different([model_fingerprint(model) for model in models])


def test_weights_that_are_not_here_have_none(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("gpt2")
    model.transformer.h[0].mlp.c_fc.weight = nn.Parameter(torch.empty(32, 128, device="meta"))
    assert model_fingerprint(model) is None
    assert "offloaded" in caplog.text
