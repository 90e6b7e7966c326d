"""The same models and engine on a CUDA device. Needs no tokenizer and no server, only torch."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from duetts.checkpoint import load_model
from duetts.config import EngineConfig
from duetts.engine.inprocess import start_speaker
from duetts.models.kv_cache import BlockRows, KVCache
from duetts.types import Chunk, Outcome, Sampling, Utterance

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact_products():
    """Full float32 products, so that the CPU's numbers can be asked for."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def test_a_started_speaker_encodes_references_without_tensor_float() -> None:
    torch.backends.cudnn.allow_tf32 = True
    wave = np.random.default_rng(1).normal(0, 0.1, 44100 * 5).astype(np.float32)

    async def codes(device: str) -> np.ndarray:
        speaker = start_speaker(GOLDEN / "model", EngineConfig(device=device, dtype="float32"))
        try:
            return await speaker.encode_reference(wave)
        finally:
            await speaker.close()

    assert np.count_nonzero(asyncio.run(codes("cuda")) != asyncio.run(codes("cpu"))) <= 4
    assert not torch.backends.cudnn.allow_tf32


@torch.inference_mode()
def test_prefill_and_codec_agree_with_the_reference() -> None:
    model = load_model(GOLDEN / "model", device=CUDA, dtype=torch.float32, codec_dtype=torch.float32)
    slow = model.dual_ar.slow
    with np.load(GOLDEN / "dual_ar.npz") as arrays:
        for name in ("p1", "p2"):
            prompt = torch.from_numpy(arrays[f"{name}_prompt"]).long().to(CUDA)
            cache = KVCache(model.config.slow, 32, 16, device=CUDA, dtype=torch.float32)
            table, start = torch.arange(16, 32, dtype=torch.int32, device=CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)
            rows = BlockRows(cache, table, start, prompt.shape[1], 256)
            hidden = slow.norm(model.dual_ar.prefill(prompt[None], rows))[0]
            logits = (hidden @ slow.output_weight.T).cpu()
            assert (logits - torch.from_numpy(arrays[f"{name}_prefill_logits"])).abs().max() < 2e-4
    with np.load(GOLDEN / "codec.npz") as arrays:
        wave = model.codec.decode(torch.from_numpy(arrays["decode_codes"]).long().to(CUDA)[None])[0].cpu()
        assert (wave - torch.from_numpy(arrays["decode_wav"])).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_speaks_many_at_once(dtype: str) -> None:
    with np.load(GOLDEN / "dual_ar.npz") as arrays:
        prompts = [arrays[name].astype(np.int32) for name in ("p1_prompt", "p2_prompt", "eos_prompt")]

    async def run() -> list[Outcome]:
        speaker = start_speaker(GOLDEN / "model", EngineConfig(device="cuda", dtype=dtype, max_num_seqs=6))

        async def one(index: int) -> Outcome:
            frames = 0
            async for item in speaker.speak(Utterance(f"r{index}", prompts[index % 3], Sampling(), index, 20 + index)):
                if isinstance(item, Chunk):
                    frames += item.num_frames
                else:
                    assert frames == item.num_frames
                    return item
            raise AssertionError("no outcome")

        outcomes = await asyncio.gather(*(one(index) for index in range(12)))
        await speaker.close()
        return outcomes

    assert {outcome.reason for outcome in asyncio.run(run())} <= {"stop", "length"}
