"""The small interpreter of ONNX graphs against the values that the operators are defined to have. No onnx needed here."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from training.data.graph import Product
from training.data.operators import OPERATORS, cut, empty_bins, gather, reshape, resize, stft


def test_shapes_stay_on_the_host_and_floats_run_in_torch() -> None:
    assert isinstance(OPERATORS["Add"](np.array([2]), np.array([3])), np.ndarray)
    mixed = OPERATORS["Mul"](torch.ones(2), np.float32(3))
    assert torch.equal(mixed, torch.full((2,), 3.0))
    assert OPERATORS["Div"](np.array([7]), np.array([2])).tolist() == [3]


def test_indexing_follows_the_definition() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(gather(x, np.array(1), axis=1), x[:, 1])
    assert gather(x, np.array([[0], [-1]]), axis=2).shape == (2, 3, 2, 1)
    assert torch.equal(cut(x, np.array([1]), np.array([2**62]), np.array([2])), x[:, :, 1:])
    assert reshape(x, np.array([0, -1])).shape == (2, 12)


def test_constants_after_a_product_become_part_of_it() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 4, 9), torch.randn(6, 4, 3), torch.randn(1, 6, 1)
    given = {"strides": [1], "pads": [1], "dilations": [1], "group": 1}
    product = Product(weight, given)
    assert product.shift(bias)
    assert product.scale(torch.tensor(0.5))
    torch.testing.assert_close(product(x), (F.conv1d(x, weight, padding=1) + bias) * 0.5)
    assert not product.scale(torch.ones(9))
    matrix = Product(torch.randn(4, 6), None)
    assert matrix.shift(torch.ones(6))
    assert matrix(torch.zeros(2, 4)).eq(1).all()


def test_resampling_and_spectra() -> None:
    x = torch.tensor([[[0.0, 1.0]]])
    assert resize(x, None, np.array([1, 1, 2], np.float32), mode="nearest").tolist() == [[[0, 0, 1, 1]]]
    assert resize(x, None, np.array([1, 1, 2], np.float32), mode="linear").tolist() == [[[0, 0.25, 0.75, 1]]]
    wave, window = torch.randn(1, 45, 1), torch.hann_window(20)
    found = stft(wave, np.array(5), window, np.array(20), onesided=1)
    wanted = torch.stft(wave[..., 0], 20, 5, window=window, center=False, return_complex=True)
    torch.testing.assert_close(torch.view_as_complex(found).mT, wanted, atol=1e-5, rtol=1e-4)


def test_a_bin_that_is_real_and_below_zero_has_the_angle_pi() -> None:
    """The graph tells the half plane by the imaginary part's sign; at minus pi the voice gets an offset and loses level."""
    found = stft(torch.full((1, 45, 1), -0.03), np.array(5), torch.hann_window(20), np.array(20), onesided=1)
    assert (found[..., 0, 1] > 0).all()
    assert (found[..., 0, 0] < 0).all()
    assert empty_bins(torch.device("cpu"))[0].imag > 0
