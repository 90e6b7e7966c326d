"""Norms and products: twins against plain torch, Triton against the twins (in its interpreter where there is no GPU)."""

import pytest
import torch
import torch.nn.functional as F

from duetts import kernels
from duetts.kernels import projection, reference
from duetts.kernels.projection import Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(block_n=16, step=128, programs=1, warps=4, stages=3, prefetch=4)  # 32 columns of float32 a step
SPLIT = SMALL._replace(programs=9)
EPS = 1e-5


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    """By norms, each row on its own; NaN is never near."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    error = (found.double() - expected.double()).flatten(0, -2).norm(dim=1)
    assert (error <= tolerance * expected.double().flatten(0, -2).norm(dim=1)).all(), error


# ---- twins


def test_twins_do_what_torch_modules_do_to_the_bit() -> None:
    x, gain, residual = draw(2, 3, 40).bfloat16(), draw(40).bfloat16(), draw(2, 3, 24).bfloat16()
    w1, w3, bias = draw(24, 40).bfloat16(), draw(24, 40, seed=1).bfloat16(), draw(24).bfloat16()
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * gain
    assert torch.equal(kernels.rms_norm(x, gain, EPS), normed)
    assert torch.equal(kernels.linear(x, w1, bias=bias), F.linear(x, w1, bias))
    assert torch.equal(kernels.linear(x, w1), x @ w1.T)
    assert torch.equal(kernels.norm_linear(x, gain, EPS, w1, None, bias), F.linear(normed, w1, bias))
    assert torch.equal(kernels.norm_gate(x, gain, EPS, w1, w3), F.silu(F.linear(normed, w1)) * F.linear(normed, w3))
    assert torch.equal(kernels.linear_add(x, w1, residual, bias=bias), residual + F.linear(x, w1, bias))


@pytest.mark.skipif(DEVICE == "cuda", reason="says what happens on a CPU")
def test_a_cpu_has_the_twin_and_its_gradients() -> None:
    x, weight = draw(2, 8).requires_grad_(), draw(4, 8)
    kernels.norm_linear(x, torch.ones(8), EPS, weight).sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        assert kernels.linear(x, weight).shape == (2, 4)


def test_8_bit_twins_scale_in_float32_and_round_once() -> None:
    x, bias = draw(3, 32).bfloat16(), draw(5).bfloat16()
    weight, scale = kernels.quantize_rows(draw(5, 32), "int8")
    expected = (x.double() @ (weight.double() * scale.double()[:, None]).T + bias.double()).bfloat16()
    found = kernels.linear(x, weight, scale, bias)
    assert found.dtype == torch.bfloat16
    assert (found != expected).sum() <= 1  # one value may lie at an edge of rounding


# ---- quantisation


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_quantised_rows_are_within_half_a_step(kind: str) -> None:
    spread = torch.logspace(-6, 3, 12)[:, None]
    weight = torch.cat((draw(12, 64).cpu() * spread, torch.zeros(1, 64), torch.full((1, 64), 1e-38)))
    eight, scale = kernels.quantize_rows(weight, kind)
    assert eight.dtype == (torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    assert scale.dtype == torch.float32
    assert scale.shape == (14,)
    assert (scale > 0).all()
    restored = eight.float() * scale[:, None]
    error = (restored - weight).abs()
    # float8_e4m3fn has 3 bits of fraction: half a step is 1/16 of the power of two below, and no less than 2^-10 (subnormals)
    step = scale[:, None] / 2 if kind == "int8" else torch.maximum(weight.abs() / 16, scale[:, None] * 2**-10)
    assert (error <= step * 1.0001).all()
    assert (restored[-2:] == 0).all()
    peaks = eight[:12].float().abs().amax(dim=1)
    assert (peaks == (448 if kind == "fp8" else 127)).all()


@pytest.mark.parametrize(("kind", "worst"), [("fp8", 0.03), ("int8", 0.012)])
def test_quantised_products_stay_close(kind: str, worst: float) -> None:
    """Weights and inputs like a model's: the error of a product is that of the weights, a few percent at most."""
    x, weight = draw(8, 512), draw(96, 512) * 0.02
    exact = x @ weight.T
    found = kernels.linear(x, *kernels.quantize_rows(weight, kind))
    assert 0.001 < ((found - exact).norm() / exact.norm()).item() < worst


# ---- Triton against the twins


@pytest.mark.parametrize(("rows", "inner"), [((1,), 32), ((3, 5), 50), ((2, 1), 130)])
def test_norm(rows: tuple[int, ...], inner: int) -> None:
    x, gain = draw(*rows, inner), draw(inner)
    assert_near(projection.rms_norm(x, gain, EPS), reference.rms_norm(x, gain, EPS))


@pytest.mark.parametrize("config", [SMALL, SPLIT, SPLIT._replace(spread=False)])
@pytest.mark.parametrize(("rows", "inner", "width"), [((1,), 96, 33), ((2, 9), 70, 16), ((65,), 40, 9)])
def test_products_of_few_rows(rows: tuple[int, ...], inner: int, width: int, config: Config) -> None:
    x, gain, weight, bias = draw(*rows, inner), draw(inner), draw(width, inner), draw(width)
    residual = draw(*rows, width)
    assert_near(projection.linear(x, weight, config=config), reference.linear(x, weight))
    expected = reference.norm_linear(x, gain, EPS, weight, None, bias)
    assert_near(projection.norm_linear(x, gain, EPS, weight, None, bias, config), expected)
    expected = reference.linear_add(x, weight, residual, None, bias)
    assert_near(projection.linear_add(x, weight, residual, None, bias, config), expected)


@pytest.mark.parametrize(("num_rows", "inner", "width"), [(3, 64, 16), (18, 50, 19)])
def test_gate(num_rows: int, inner: int, width: int) -> None:
    x, gain, w1, w3 = draw(num_rows, 1, inner), draw(inner), draw(width, inner), draw(width, inner, seed=1)
    assert_near(projection.norm_gate(x, gain, EPS, w1, w3, config=SPLIT), reference.norm_gate(x, gain, EPS, w1, w3))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("num_rows", "inner"), [(2, 96), (67, 40), (130, 32)])
def test_8_bit_weights(num_rows: int, inner: int, kind: str) -> None:
    x, gain, bias, residual = draw(num_rows, inner), draw(inner), draw(20), draw(num_rows, 20)
    (w1, scale1), (w3, scale3) = (kernels.quantize_rows(draw(20, inner, seed=seed), kind) for seed in (0, 1))
    config = SPLIT._replace(step=32)
    expected = reference.norm_gate(x, gain, EPS, w1, w3, scale1, scale3)
    assert_near(projection.norm_gate(x, gain, EPS, w1, w3, scale1, scale3, config), expected)
    expected = reference.linear_add(x, w1, residual, scale1, bias)
    assert_near(projection.linear_add(x, w1, residual, scale1, bias, config), expected)


def test_many_rows_take_separate_kernels() -> None:
    x, gain, w1, w3, residual = draw(66, 24), draw(24), draw(20, 24), draw(20, 24, seed=1), draw(66, 20)
    assert_near(projection.norm_gate(x, gain, EPS, w1, w3), reference.norm_gate(x, gain, EPS, w1, w3))
    assert_near(projection.norm_linear(x, gain, EPS, w1), reference.norm_linear(x, gain, EPS, w1))
    assert torch.equal(projection.linear_add(x, w1, residual), reference.linear_add(x, w1, residual))


def test_half_types_are_rounded_where_torch_rounds() -> None:
    """float16: of 320 values at most a few differ, by one step, for another order of addition."""
    x, gain = draw(5, 64, dtype=torch.float16), draw(64, dtype=torch.float16)
    w1, w3 = draw(64, 64, dtype=torch.float16) / 8, draw(64, 64, seed=1, dtype=torch.float16) / 8
    for found, expected in (
        (projection.rms_norm(x, gain, EPS), reference.rms_norm(x, gain, EPS)),
        (projection.norm_gate(x, gain, EPS, w1, w3, config=SMALL), reference.norm_gate(x, gain, EPS, w1, w3)),
        (projection.linear_add(x, w1, x, config=SPLIT), reference.linear_add(x, w1, x)),
    ):
        assert_near(found, expected, 3e-4)
        assert (found != expected).float().mean() < 0.05


def test_a_row_does_not_depend_on_its_company() -> None:
    x, gain, w1, w3, residual = draw(16, 70), draw(70), draw(33, 70), draw(33, 70, seed=1), draw(16, 33)
    gated = projection.norm_gate(x, gain, EPS, w1, w3, config=SMALL)
    added = projection.linear_add(x, w1, residual, config=SPLIT)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 16)):
        assert torch.equal(projection.norm_gate(x[rows], gain, EPS, w1, w3, config=SMALL), gated[rows])
        assert torch.equal(projection.linear_add(x[rows], w1, residual[rows], config=SPLIT), added[rows])


def test_views_and_empty_shapes_of_leading_dimensions() -> None:
    x, weight = draw(4, 3, 40).transpose(0, 1), draw(20, 40)
    assert_near(projection.linear(x, weight, config=SMALL), reference.linear(x, weight))


# ---- configurations

H200 = projection.Device((9, 0), 132, 228 * 1024)


@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize(("width", "inner", "gated"), [
    (6144, 2560, False), (9728, 2560, True), (2560, 4096, False), (2560, 9728, False), (4097, 2560, False),
])  # fmt: skip
def test_all_programs_run_at_once_with_enough_in_flight(
    num_rows: int, width: int, inner: int, gated: bool, weight_type: torch.dtype
) -> None:
    """S2 Pro on an H200: no second wave, and at least 32 KB of weights on their way per multiprocessor."""
    weight = torch.empty(width, inner, dtype=weight_type, device="meta")
    config = projection.choose(num_rows, weight, gated=gated)
    block_k, steps, split = projection._cut(config, weight, num_rows)
    per_program = -(-steps // split)
    assert per_program * (split - 1) < steps <= per_program * split
    programs = -(-width // config.block_n) * split
    size = projection.stage_bytes(config, projection.row_class(num_rows), block_k, 2, gated=gated)
    stages = projection.stages(config, H200, size, programs)
    assert stages >= 3
    assert programs <= 132 * (H200.shared // (stages * size + projection.KEPT_SHARED))
    assert programs * (stages - 1) * config.block_n * config.step * (2 if gated else 1) >= 132 * 32 * 1024


def test_no_part_of_a_split_is_empty() -> None:
    for inner in (32, 33, 2560, 4096, 9728):
        for programs in (1, 2, 5, 130, 1000):
            config = SMALL._replace(programs=programs)
            _, steps, split = projection._cut(config, torch.empty(16, inner, device="meta"), 1)
            assert -(-steps // split) * (split - 1) < steps


def test_what_is_asked_ahead_lies_within_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(1, 2560, device="meta")
    for capability, early in (((9, 0), True), ((10, 0), True), ((8, 9), False), ((12, 0), False)):
        monkeypatch.setattr(projection, "device_of", lambda x, capability=capability: H200._replace(capability=capability))
        assert projection._dependent(x, SMALL)["DEPENDENT"] is early
        for inner in (2560, 4096, 9728, 2561):
            weight = torch.empty(64, inner, dtype=torch.bfloat16, device="meta")
            for programs in (1, 3, 7, 100):
                config = SMALL._replace(block_n=64, programs=programs, prefetch=8)
                block_k, steps, split = projection._cut(config, weight, 1)
                ahead = projection._ahead(config, x, weight, block_k, steps, split)
                assert (ahead > 0) == (early and inner % block_k == 0)
                assert ahead & (ahead - 1) == 0
                assert -(-steps // split) * (split - 1) + ahead <= steps
    monkeypatch.setattr(projection, "EARLY_START", False)
    monkeypatch.setattr(projection, "device_of", lambda x: H200)
    assert projection._dependent(x, SMALL) == {"DEPENDENT": False}


def test_calls_that_kernels_do_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, vector = draw(2, 64).bfloat16(), draw(8, 64).bfloat16(), draw(64).bfloat16()
    scale = torch.ones(8)

    def supported(
        capability: tuple[int, int] = (9, 0), x: torch.Tensor = x, weight: torch.Tensor = weight, **more: object
    ) -> bool:
        monkeypatch.setattr(projection, "device_of", lambda x: H200._replace(capability=capability))
        return projection.supported(x, (weight,), (more.get("scale"),), (more.get("vector", vector), None))

    assert supported()
    assert supported(weight=weight.to(torch.int8), scale=scale)
    assert supported(weight=weight.to(torch.float8_e4m3fn), scale=scale)
    refused = [
        {"capability": (7, 5)}, {"x": x[:0]}, {"x": x.double()}, {"weight": weight.float()},
        {"weight": weight.T.contiguous().T},
        {"vector": vector.float()}, {"weight": weight.to(torch.int8)}, {"scale": scale},
        {"weight": weight.to(torch.float8_e4m3fn), "scale": scale, "capability": (8, 0)},
    ]  # fmt: skip
    assert not any(supported(**call) for call in refused)
