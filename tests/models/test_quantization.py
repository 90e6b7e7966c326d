"""Matrices of 8 bits: the model still says nearly the same."""

from pathlib import Path

import pytest
import torch

from duetts.checkpoint import load_model
from duetts.models.blocks import Projection
from duetts.models.dual_ar import DualAR
from duetts.models.kv_cache import KVCache, SeparateRows

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "model"


@torch.inference_mode()
def logits(model: DualAR) -> torch.Tensor:
    """Of what may follow 40 columns of all kinds."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 200, (1, 1 + config.num_codebooks, 40), generator=generator)
    prompt[:, 1:] %= 32
    prompt[:, 0, 20:] = config.semantic_start + prompt[:, 1, 20:]
    cache = KVCache(config.slow, 3, 16, device=CPU, dtype=torch.float32)
    hidden = model.slow.norm(model.prefill(prompt, SeparateRows(cache, [[0, 1, 2]], [0], 40)))
    return model.slow.choice_logits(hidden)[0]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_quantized_model_says_nearly_the_same(kind: str) -> None:
    exact, coarse = (
        load_model(GOLDEN, device=CPU, dtype=torch.float32, codec_dtype=torch.float32, quantization=quantization).dual_ar
        for quantization in ("none", kind)
    )
    assert {module.weight.itemsize for module in coarse.modules() if isinstance(module, Projection)} == {1}
    assert coarse.slow.head.dtype == torch.float32
    wanted, found = logits(exact), logits(coarse)
    error = ((found - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    assert 0 < error < (0.12 if kind == "fp8" else 0.03)
