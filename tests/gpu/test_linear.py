"""Norms and products on a GPU: all types, S2 Pro's shapes, CUDA graphs, and rows that must not notice their company."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from duetts import kernels
from duetts.kernels import reference

pytestmark = pytest.mark.gpu
projection = pytest.importorskip("duetts.kernels.projection")

CUDA = torch.device("cuda")
EPS = 1e-6
SHAPES = {"qkv": (6144, 2560), "wo": (2560, 4096), "w2": (2560, 9728), "head": (4097, 2560), "fast head": (1024, 2560)}
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> torch.Tensor:
    return torch.empty(*shape, device=CUDA).normal_(std=std).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    error = (found.double() - expected.double()).flatten(0, -2).norm(dim=1)
    limit = TOLERANCE[found.dtype] if tolerance is None else tolerance
    assert (error <= limit * expected.double().flatten(0, -2).norm(dim=1)).all(), error.max()


@torch.inference_mode()
def test_a_gpu_has_the_kernels_outside_training() -> None:
    x, weight = draw(2, 64), draw(32, 64)
    assert kernels._products(x, (weight,), (None,), ()) is projection
    with torch.inference_mode(False), torch.enable_grad():
        assert kernels._products(x, (weight,), (None,), ()) is reference
    for refused in (weight.T.contiguous().T, weight.float(), weight.double()):
        assert kernels._products(x, (refused,), (None,), ()) is reference
    assert kernels._products(x[:0], (weight,), (None,), ()) is reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 32, 48, 64, 65, 192])
@torch.inference_mode()
def test_real_shapes(num_rows: int, dtype: torch.dtype) -> None:
    for width, inner in SHAPES.values():
        x, gain, residual = draw(num_rows, inner, dtype=dtype), draw(inner, dtype=dtype), draw(num_rows, width, dtype=dtype)
        weight, bias = draw(width, inner, dtype=dtype, std=inner**-0.5), draw(width, dtype=dtype)
        assert_near(kernels.linear(x, weight), reference.linear(x, weight))
        assert_near(
            kernels.norm_linear(x, gain, EPS, weight, None, bias), reference.norm_linear(x, gain, EPS, weight, None, bias)
        )
        found = kernels.linear_add(x[:, None], weight, residual[:, None], None, bias)
        assert_near(found, reference.linear_add(x[:, None], weight, residual[:, None], None, bias))
    x, gain = draw(num_rows, 2560, dtype=dtype), draw(2560, dtype=dtype)
    w1, w3 = (draw(9728, 2560, dtype=dtype, std=2560**-0.5) for _ in range(2))
    assert_near(kernels.norm_gate(x, gain, EPS, w1, w3), reference.norm_gate(x, gain, EPS, w1, w3))
    assert_near(kernels.rms_norm(x, gain, EPS), reference.rms_norm(x, gain, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("inner", "width"), [(48, 20), (130, 33), (2562, 65), (96, 5200)])
@torch.inference_mode()
def test_odd_shapes(inner: int, width: int, dtype: torch.dtype) -> None:
    for num_rows in (1, 5, 20, 40):
        x, gain, residual = draw(num_rows, inner, dtype=dtype), draw(inner, dtype=dtype), draw(num_rows, width, dtype=dtype)
        w1, w3 = (draw(width, inner, dtype=dtype, std=inner**-0.5) for _ in range(2))
        assert_near(kernels.norm_linear(x, gain, EPS, w1), reference.norm_linear(x, gain, EPS, w1))
        assert_near(kernels.norm_gate(x, gain, EPS, w1, w3), reference.norm_gate(x, gain, EPS, w1, w3))
        assert_near(kernels.linear_add(x, w1, residual), reference.linear_add(x, w1, residual))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("num_rows", [1, 16, 30, 64, 150])
@torch.inference_mode()
def test_8_bit_weights(num_rows: int, kind: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for width, inner in ((2560, 9728), (4097, 2560), (33, 112)):
            weight, scale = kernels.quantize_rows(draw(width, inner, std=inner**-0.5), kind)
            x, residual, bias = draw(num_rows, inner, dtype=dtype), draw(num_rows, width, dtype=dtype), draw(width, dtype=dtype)
            assert kernels._products(x, (weight,), (scale,), (bias,)) is projection
            expected = reference.linear_add(x, weight, residual, scale, bias)
            assert_near(kernels.linear_add(x, weight, residual, scale, bias), expected)
        gain, x = draw(2560, dtype=dtype), draw(num_rows, 2560, dtype=dtype)
        (w1, s1), (w3, s3) = (kernels.quantize_rows(draw(9728, 2560, std=2560**-0.5), kind) for _ in range(2))
        assert_near(kernels.norm_gate(x, gain, EPS, w1, w3, s1, s3), reference.norm_gate(x, gain, EPS, w1, w3, s1, s3))


@torch.inference_mode()
def test_products_of_up_to_128_rows_if_they_are_asked_for() -> None:
    for num_rows in (65, 128):
        x, gain, residual = draw(num_rows, 2560), draw(2560), draw(num_rows, 2560)
        w1, w3, w2 = draw(9728, 2560, std=0.02), draw(9728, 2560, std=0.02), draw(2560, 9728, std=0.01)
        gated = projection.norm_gate(x, gain, EPS, w1, w3, config=projection.choose(num_rows, w1, gated=True))
        assert_near(gated, reference.norm_gate(x, gain, EPS, w1, w3))
        found = projection.linear_add(gated, w2, residual, config=projection.choose(num_rows, w2))
        assert_near(found, reference.linear_add(gated, w2, residual))


@pytest.mark.parametrize(("first", "last"), [(1, 16), (17, 32), (33, 64)])
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_company(first: int, last: int) -> None:
    x, gain, residual = draw(last, 2560), draw(2560), draw(last, 2560)
    w1, w3 = draw(9728, 2560, std=0.02), draw(9728, 2560, std=0.02)
    w2 = draw(2560, 9728, std=0.01)
    gated = kernels.norm_gate(x, gain, EPS, w1, w3)
    added = kernels.linear_add(gated, w2, residual)
    for num_rows in {first, first + 2, last - 1}:
        assert torch.equal(kernels.norm_gate(x[:num_rows], gain, EPS, w1, w3), gated[:num_rows])
        assert torch.equal(kernels.linear_add(gated[:num_rows], w2, residual[:num_rows]), added[:num_rows])


def layers(x: torch.Tensor, weights: list[dict[str, torch.Tensor]], dependent: bool) -> torch.Tensor:
    """A chain in which every kernel needs what the one before it wrote, and memory is used again and again."""

    def own(weight: torch.Tensor, gated: bool = False) -> Any:
        return projection.choose(x.shape[0], weight, gated=gated)._replace(dependent=dependent)

    for w in weights:
        heads = projection.norm_linear(x, w["gain"], EPS, w["qkv"], config=own(w["qkv"]))
        x = projection.linear_add(heads, w["wo"], x, config=own(w["wo"]))
        gated = projection.norm_gate(x, w["gain"], EPS, w["w1"], w["w3"], config=own(w["w1"], True))
        x = projection.linear_add(gated, w["w2"], x, config=own(w["w2"]))
    return x


@pytest.mark.parametrize("num_rows", [1, 16, 24, 64])
@torch.inference_mode()
def test_kernels_that_start_early_see_finished_inputs(num_rows: int) -> None:
    """Programmatic dependent launch, eager and in a replayed CUDA graph, changes no bit of 24 chained kernels."""
    sizes = {"qkv": (6144, 2560), "wo": (2560, 6144), "w1": (9728, 2560), "w3": (9728, 2560), "w2": (2560, 9728)}
    weights = [{use: draw(*size, std=0.02) for use, size in sizes.items()} | {"gain": draw(2560)} for _ in range(6)]
    x = draw(num_rows, 2560)
    expected = layers(x, weights, dependent=False)
    assert expected.isfinite().all()
    for _ in range(20):
        assert torch.equal(layers(x, weights, dependent=True), expected)
    replay = captured(lambda: layers(x, weights, dependent=True))
    for _ in range(50):
        assert torch.equal(replay(), expected)
    x.copy_(draw(num_rows, 2560))
    assert torch.equal(replay(), layers(x, weights, dependent=False))


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


@pytest.mark.parametrize("num_rows", [1, 100])
@torch.inference_mode()
def test_public_functions_in_a_cuda_graph(num_rows: int) -> None:
    x, gain, w1, w3 = draw(num_rows, 2560), draw(2560), draw(9728, 2560, std=0.02), draw(9728, 2560, std=0.02)
    w2 = draw(2560, 9728, std=0.01)

    def run() -> torch.Tensor:
        return kernels.rms_norm(kernels.linear_add(kernels.norm_gate(x, gain, EPS, w1, w3), w2, x), gain, EPS)

    run()
    replay = captured(run)
    x.copy_(draw(num_rows, 2560))
    assert_near(replay(), reference.rms_norm(reference.linear_add(reference.norm_gate(x, gain, EPS, w1, w3), w2, x), gain, EPS))
