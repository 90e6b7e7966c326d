"""The real S2 Pro dimensions give exactly the tensors of the published files."""

import json
from pathlib import Path

from duetts.model_config import CodecConfig, ModelConfig
from tests.published import describe_layout

DATA = Path(__file__).parents[1] / "data"


def test_real_layout_on_the_meta_device() -> None:
    layout = json.loads((DATA / "golden" / "s2_pro_full_layout.json").read_text())
    config = ModelConfig.from_dict(json.loads((DATA / "s2_pro_config.json").read_text()))
    language, codec = describe_layout(config, CodecConfig())
    assert {name: list(shape) for name, shape in language.items()} == layout["checkpoint"]["tensors"]
    assert {name: list(shape) for name, shape in codec.items()} == layout["codec"]["tensors"]
