"""The codec against the reference implementation: every array of `codec.npz`, at its README's tolerance."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from duetts.checkpoint import load_model
from duetts.models.codec import Codec
from duetts.models.codec_layers import CausalConv, CausalTransposedConv

from .arrays import Arrays

WAVE = 1e-4
LATENT = 2e-4
MARGIN = 1e-4


@pytest.fixture(scope="module")
def codec(golden_dir: Path) -> Codec:
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "codec_dtype": torch.float32}
    return load_model(golden_dir / "model", **options).codec


@pytest.fixture(scope="module")
def arrays(golden_dir: Path) -> Arrays:
    return Arrays(golden_dir / "codec.npz")


def cosine_margins(codec: Codec, z: Tensor) -> Tensor:
    """Distance between the best and the second-best cosine of every search [books, frames]."""
    quantizer = codec.quantizer
    margins, rest = [], z
    for book in (*quantizer.semantic_quantizer.quantizers, *quantizer.quantizer.quantizers):
        query = nn.functional.normalize(book.in_proj(rest).transpose(1, 2), dim=-1)
        cosines = query @ nn.functional.normalize(book.codebook.weight, dim=-1).T
        best, second = cosines.topk(2).values.unbind(-1)
        margins.append((best - second)[0])
        rest = rest - book.value(book.search(rest))
    return torch.stack(margins)


@torch.inference_mode()
def check_encode(codec: Codec, arrays: Arrays) -> None:
    wave = arrays.given("wav_in")[None]
    codes = codec.encode(wave)
    arrays.compare("encode_codes", codes[0])
    arrays.compare("encode_len", torch.tensor([codes.shape[-1]]))
    arrays.compare("encode_short_codes", codec.encode(wave[:, :1500])[0])
    padded = nn.functional.pad(wave, (0, -wave.shape[-1] % codec.config.frame_length))
    latents = codec.encoder(padded[:, None])
    arrays.compare("enc_latent_b", latents[0], LATENT)
    down = codec.quantizer.downsample(latents)
    arrays.compare("enc_down", down[0], LATENT)
    z = codec.quantizer.pre_module(down)
    arrays.compare("enc_pre_module", z[0], LATENT)
    arrays.compare("encode_cosine_margin", cosine_margins(codec, z), MARGIN)
    arrays.compare("roundtrip_wav", codec.decode(codes)[0], WAVE)


@torch.inference_mode()
def check_decode(codec: Codec, arrays: Arrays) -> None:
    codes, quantizer = arrays.given("decode_codes")[None], codec.quantizer
    value = quantizer.value(codes)
    arrays.compare("dec_zq", value[0], LATENT)
    inner = quantizer.post_module(value)
    arrays.compare("dec_post_module", inner[0], LATENT)
    arrays.compare("dec_upsample", quantizer.upsample(inner)[0], LATENT)
    arrays.compare("decode_wav", codec.decode(codes)[0], WAVE)


@torch.inference_mode()
def check_clamping(codec: Codec, arrays: Arrays) -> None:
    codes, expected = arrays.given("decode_clamp_codes")[None], arrays.given("decode_clamp_wav")
    assert codes[:, 1:].max() >= codec.config.residual_size
    arrays.compare("decode_clamp_wav", codec.decode(codes)[0, : len(expected)], WAVE)


@torch.inference_mode()
def check_layers(codec: Codec, arrays: Arrays) -> None:
    layers = {
        "ru": codec.decoder.model[1].block[2],
        "tconv": codec.decoder.model[1].block[1],
        "convnext": codec.quantizer.upsample[0][1],
        "sconv": codec.encoder.block[1].block[4],
        "wlt": codec.quantizer.post_module,
        "enc_wlt": codec.encoder.block[4].block[5],
    }
    assert isinstance(layers["tconv"], CausalTransposedConv)
    assert isinstance(layers["sconv"], CausalConv)
    for name, layer in layers.items():
        arrays.compare(f"{name}_out", layer(arrays.given(f"{name}_in")[None])[0], LATENT)


CHECKS = (check_encode, check_decode, check_clamping, check_layers)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_against_reference(check, codec: Codec, arrays: Arrays) -> None:
    check(codec, arrays)


def test_no_array_is_left_out(codec: Codec, golden_dir: Path) -> None:
    fresh = Arrays(golden_dir / "codec.npz")
    for check in CHECKS:
        check(codec, fresh)
    assert fresh.names - fresh.used == set()
