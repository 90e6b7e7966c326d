"""References encoded in blocks on a CUDA device."""

from pathlib import Path

import numpy as np
import pytest
import torch

from duetts.checkpoint import load_model
from duetts.engine.reference_encoder import ReferenceEncoder

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FRAME = 2048


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_waits_for_nothing_and_gives_the_codes_of_a_cpu() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    options = {"dtype": torch.float32, "codec_dtype": torch.float32}
    on_cpu = load_model(GOLDEN / "model", device=torch.device("cpu"), **options).codec
    on_gpu = load_model(GOLDEN / "model", device=torch.device("cuda"), **options).codec
    assert on_gpu.encoding_id() != on_cpu.encoding_id()
    encoder = ReferenceEncoder(on_gpu, max_waiting=4, block_frames=6)
    rng = np.random.default_rng(0)
    waves = [rng.normal(0, 0.1, samples).astype(np.float32) for samples in (1, 5 * FRAME + 1, 40 * FRAME)]
    try:
        for _ in range(2):  # the first time libraries may wait while they choose
            futures = [encoder.submit(wave) for wave in waves]
            while encoder.step():
                pass
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for wave, future in zip(waves, futures, strict=True):
        codes = future.result(0)
        with torch.inference_mode():
            expected = on_cpu.encode(torch.from_numpy(wave)[None])[0].numpy()
        assert codes.shape == expected.shape
        assert np.count_nonzero(codes != expected) <= 0.01 * codes.size
    assert encoder.idle
