"""The dimensions of a model, read from its folder's `config.json` and `codec_config.json`.

Every key is checked: a wrong type, an impossible value or an unknown key is a `CheckpointError` that names file and key.
This room knows no torch and no settings of engine or server (those are in `config.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duetts.errors import CheckpointError, UnsupportedModel
from duetts.json_fields import Fields, read_json

WEIGHT_TYPES = ("bfloat16", "float16", "float32")
SUPPORTED_MODEL_TYPES = ("fish_qwen3_omni", "dual_ar")


# -- model --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Dimensions of one transformer decoder, slow or fast."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_positions: int
    rope_base: float
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"config: {self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise CheckpointError(f"config: head_dim is {self.head_dim}; rotary embedding needs an even number")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dual-AR language model: token ranges, family switches and both decoders."""

    model_type: str
    slow: DecoderConfig
    fast: DecoderConfig
    num_codebooks: int
    end_id: int
    semantic_start: int
    semantic_end: int
    tie_word_embeddings: bool
    scale_codebook_embeddings: bool
    norm_fast_input: bool
    dtype: str
    untrained: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in WEIGHT_TYPES:
            raise CheckpointError(f"config: dtype {self.dtype!r} is not one of {', '.join(WEIGHT_TYPES)}")
        if not 0 <= self.semantic_start <= self.semantic_end < self.slow.vocab_size:
            raise CheckpointError(
                f"config: semantic tokens {self.semantic_start}..{self.semantic_end} do not lie in a "
                f"vocabulary of {self.slow.vocab_size}"
            )
        if not 0 <= self.end_id < self.slow.vocab_size or self.semantic_start <= self.end_id <= self.semantic_end:
            raise CheckpointError(f"config: end token {self.end_id} is no text token of the vocabulary")
        if self.num_semantic > self.fast.vocab_size:
            raise CheckpointError(
                f"config: {self.num_semantic} semantic tokens exceed the {self.fast.vocab_size} codes of the fast decoder"
            )

    @property
    def num_semantic(self) -> int:
        return self.semantic_end - self.semantic_start + 1

    @property
    def fast_project(self) -> bool:
        """True when the two decoders have different widths, so that a projection joins them."""
        return self.slow.dim != self.fast.dim

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], tokens: Mapping[str, int] | None = None) -> ModelConfig:
        """Reads either family; `tokens` gives ids by name where a flat configuration has none.

        Raises `UnsupportedModel` for another `model_type`, `CheckpointError` for bad keys.
        """
        where = "config.json"
        kind = values.get("model_type")
        if kind == "fish_qwen3_omni":
            return _read_nested(values, where)
        if kind == "dual_ar":
            return _read_flat(values, where, tokens or {})
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise UnsupportedModel(f"{where}: model_type {kind!r} is not supported; supported are {supported}")


# Keys that say nothing about inference, and what the common hub tools add to any file.
IGNORED = (
    "_name_or_path", "architectures", "auto_map", "transformers_version", "torch_dtype", "pad_token_id", "bos_token_id",
    "audio_pad_token_id", "dropout", "initializer_range", "use_gradient_checkpointing", "audio_hidden_dim", "is_reward_model",
    "share_codebook_embeddings", "tokenizer_path", "fast_dropout",
)  # fmt: skip


AS_MANY_AS_HEADS = -1  # how older files say that every query head has its own key-value head


def _usual_ffn_dim(dim: int) -> int:
    """What an absent `intermediate_size` means in older files: two thirds of 4 dim, up to a multiple of 256."""
    return -(-(8 * dim // 3) // 256) * 256


def _read_decoder(source: Fields, spell: Callable[[str], str], vocab_size: int, **fixed: Any) -> DecoderConfig:
    """One decoder from `source`, its keys spelled by `spell`; `fixed` holds what is decided elsewhere or its defaults."""
    default = fixed.pop("default", None)
    dim = source.integer(spell("dim"), default.dim if default else ...)
    heads = source.integer(spell("n_head"), default.num_heads if default else ...)
    kv_heads = source.integer(spell("n_local_heads"), default.num_kv_heads if default else heads, AS_MANY_AS_HEADS)
    return DecoderConfig(
        dim=dim,
        num_heads=heads,
        num_kv_heads=heads if kv_heads == AS_MANY_AS_HEADS else kv_heads,
        head_dim=source.integer(spell("head_dim"), default.head_dim if default else max(1, dim // heads)),
        ffn_dim=source.integer(spell("intermediate_size"), default.ffn_dim if default else _usual_ffn_dim(dim)),
        vocab_size=vocab_size,
        qk_norm=source.flag(spell("attention_qk_norm"), default.qk_norm if default else False),
        qkv_bias=source.flag(spell("attention_qkv_bias"), default.qkv_bias if default else False),
        o_bias=source.flag(spell("attention_o_bias"), default.o_bias if default else False),
        **fixed,
    )


def _read_slow(source: Fields) -> DecoderConfig:
    return _read_decoder(
        source,
        str,
        source.integer("vocab_size"),
        num_layers=source.integer("n_layer"),
        max_positions=source.integer("max_seq_len", 2048),
        rope_base=source.number("rope_base", 10000.0),
        norm_eps=source.number("norm_eps", 1e-5),
    )


def _refuse_experts(source: Fields, where: str) -> None:
    if source.flag("use_moe", False):
        raise UnsupportedModel(f"{where}: use_moe is true; mixtures of experts are not supported")


def _read_nested(values: Mapping[str, Any], where: str) -> ModelConfig:
    """`fish_qwen3_omni`: the reference runs the fast decoder with the slow one's rope base and norm epsilon."""
    top = Fields(values, where, IGNORED)
    text = top.section("text_config", IGNORED)
    audio = top.section("audio_decoder_config", (*IGNORED, "rope_base", "norm_eps", "max_seq_len"))
    for part in (top, text, audio):
        part.text("model_type", "")
        _refuse_experts(part, where)
    slow = _read_slow(text)
    num_codebooks = audio.integer("num_codebooks", minimum=2)
    for name, value, expected in (
        ("text_dim", audio.integer("text_dim", slow.dim), slow.dim),
        ("tie_word_embeddings", audio.flag("tie_word_embeddings", False), False),
        ("num_codebooks", text.integer("num_codebooks", num_codebooks), num_codebooks),
    ):
        if value != expected:
            raise CheckpointError(f"{where}: {name} is {value} where the other decoder's section implies {expected}")
    fast = _read_decoder(
        audio,
        str,
        audio.integer("vocab_size"),
        num_layers=audio.integer("n_layer"),
        max_positions=num_codebooks,
        rope_base=slow.rope_base,
        norm_eps=slow.norm_eps,
    )
    config = ModelConfig(
        model_type="fish_qwen3_omni",
        slow=slow,
        fast=fast,
        num_codebooks=num_codebooks,
        end_id=top.integer("eos_token_id", minimum=0),
        semantic_start=top.integer("semantic_start_token_id", minimum=0),
        semantic_end=top.integer("semantic_end_token_id", minimum=0),
        tie_word_embeddings=text.flag("tie_word_embeddings", True),
        scale_codebook_embeddings=text.flag("scale_codebook_embeddings", True),
        norm_fast_input=text.flag("norm_fastlayer_input", True),
        dtype=top.text("dtype", "bfloat16"),
        untrained=top.flag("untrained", False),
    )
    for part in (top, text, audio):
        part.finish()
    return config


def _read_flat(values: Mapping[str, Any], where: str, tokens: Mapping[str, int]) -> ModelConfig:
    """`dual_ar`: one flat object; `fast_*` keys default to the slow values, token ids come from the tokenizer if absent."""
    top = Fields(values, where, IGNORED)
    top.text("model_type", "")
    _refuse_experts(top, where)
    slow = _read_slow(top)
    num_codebooks = top.integer("num_codebooks", minimum=2)
    semantic = [index for name, index in tokens.items() if name.startswith("<|semantic:")]
    fast = _read_decoder(
        top,
        lambda key: f"fast_{key}",
        top.integer("codebook_size"),
        default=slow,
        num_layers=top.integer("n_fast_layer", 4),
        max_positions=num_codebooks,
        rope_base=slow.rope_base,
        norm_eps=slow.norm_eps,
    )
    config = ModelConfig(
        model_type="dual_ar",
        slow=slow,
        fast=fast,
        num_codebooks=num_codebooks,
        end_id=top.integer("eos_token_id", tokens.get("<|im_end|>", ...), minimum=0),
        semantic_start=top.integer("semantic_start_token_id", min(semantic, default=...), minimum=0),
        semantic_end=top.integer("semantic_end_token_id", max(semantic, default=...), minimum=0),
        tie_word_embeddings=top.flag("tie_word_embeddings", True),
        scale_codebook_embeddings=top.flag("scale_codebook_embeddings", False),
        norm_fast_input=top.flag("norm_fastlayer_input", False),
        dtype=top.text("dtype", "bfloat16"),
        untrained=top.flag("untrained", False),
    )
    top.finish()
    return config


# -- codec --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """A causal transformer whose positions see only the last `window` ones. Multi-head, no biases."""

    num_layers: int
    dim: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    window: int
    norm_eps: float = 1e-5
    rope_base: float = 10000.0


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """The waveform codec. The defaults are S2 Pro's, whose repository has no file that says them."""

    sample_rate: int = 44100
    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 8, 8)
    encoder_transformers: tuple[WindowConfig | None, ...] = (None, None, None, WindowConfig(4, 1024, 16, 64, 3072, 512))
    latent_dim: int = 1024
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)
    downsample: tuple[int, ...] = (2, 2)
    pre_module: WindowConfig = WindowConfig(8, 1024, 16, 64, 3072, 128)
    post_module: WindowConfig = WindowConfig(8, 1024, 16, 64, 3072, 128)
    codebook_dim: int = 8
    semantic_size: int = 4096
    residual_size: int = 1024
    num_residual: int = 9

    @property
    def num_codebooks(self) -> int:
        return 1 + self.num_residual

    @property
    def frame_length(self) -> int:
        """Samples in one frame."""
        return math.prod(self.encoder_rates) * math.prod(self.downsample)

    def __post_init__(self) -> None:
        if math.prod(self.decoder_rates) != math.prod(self.encoder_rates):
            raise CheckpointError(f"codec: decoder rates {self.decoder_rates} do not undo encoder rates {self.encoder_rates}")
        if self.encoder_dim << len(self.encoder_rates) != self.latent_dim:
            raise CheckpointError(
                f"codec: encoder_dim {self.encoder_dim} doubled {len(self.encoder_rates)} times is not "
                f"latent_dim {self.latent_dim}"
            )
        if self.decoder_dim % (1 << len(self.decoder_rates)):
            raise CheckpointError(f"codec: decoder_dim {self.decoder_dim} cannot be halved {len(self.decoder_rates)} times")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "codec_config.json") -> CodecConfig:
        """Reads an optional `codec_config.json`; absent keys are S2 Pro's. `quantizer_transformer` sets pre and post modules,
        `pre_module_layers` and `post_module_layers` their depths one by one."""
        base = cls()
        top = Fields(values, where, ("quantizer_dim", "frame_length", "_comment"))
        encoder_dim = top.integer("encoder_dim", base.encoder_dim)
        latent_dim = top.integer("latent_dim", base.latent_dim)
        rates = top.integers("encoder_rates", base.encoder_rates)
        head_dim = top.integer("encoder_transformer_head_dim", 64)
        window = top.integer("encoder_transformer_window", 512)
        layers = top.integers("encoder_transformer_layers", (*(0 for _ in rates[1:]), 4))
        encoders = [_encoder_window(depth, encoder_dim << (i + 1), head_dim, window, where) for i, depth in enumerate(layers)]
        inner = top.section("quantizer_transformer")
        module = WindowConfig(
            num_layers=inner.integer("n_layer", base.pre_module.num_layers),
            dim=latent_dim,
            num_heads=inner.integer("n_head", base.pre_module.num_heads),
            head_dim=inner.integer("head_dim", base.pre_module.head_dim),
            ffn_dim=inner.integer("intermediate_size", base.pre_module.ffn_dim),
            window=inner.integer("window", base.pre_module.window),
            norm_eps=inner.number("norm_eps", base.pre_module.norm_eps),
            rope_base=inner.number("rope_base", base.pre_module.rope_base),
        )
        config = cls(
            sample_rate=top.integer("sample_rate", base.sample_rate),
            encoder_dim=encoder_dim,
            encoder_rates=rates,
            encoder_transformers=tuple(encoders),
            latent_dim=latent_dim,
            decoder_dim=top.integer("decoder_dim", base.decoder_dim),
            decoder_rates=top.integers("decoder_rates", base.decoder_rates),
            downsample=top.integers("downsample_factor", base.downsample),
            pre_module=replace(module, num_layers=top.integer("pre_module_layers", module.num_layers)),
            post_module=replace(module, num_layers=top.integer("post_module_layers", module.num_layers)),
            codebook_dim=top.integer("codebook_dim", base.codebook_dim),
            semantic_size=top.integer("semantic_codebook_size", base.semantic_size),
            residual_size=top.integer("residual_codebook_size", base.residual_size),
            num_residual=top.integer("n_residual_codebooks", base.num_residual),
        )
        for key, value in (("quantizer_dim", latent_dim), ("frame_length", config.frame_length)):
            if values.get(key, value) != value:
                raise CheckpointError(f"{where}: {key!r} is {values[key]!r}; the other keys make it {value}")
        inner.finish()
        top.finish()
        return config


def _encoder_window(depth: int, dim: int, head_dim: int, window: int, where: str) -> WindowConfig | None:
    if depth == 0:
        return None
    if dim % head_dim:
        raise CheckpointError(f"{where}: encoder_transformer_head_dim {head_dim} does not divide width {dim}")
    return WindowConfig(depth, dim, dim // head_dim, head_dim, 3 * dim, window)


def read_codec_config(folder: Path) -> CodecConfig:
    """The codec's configuration: that of the folder, or else S2 Pro's, whose repository has none."""
    path = folder / "codec_config.json"
    return CodecConfig.from_dict(read_json(path)) if path.exists() else CodecConfig()


def read_model_config(folder: Path) -> ModelConfig:
    """The model's configuration; token ids that it does not name are looked up in the folder's tokenizer.json."""
    values = read_json(folder / "config.json")
    tokens: dict[str, int] = {}
    if values.get("model_type") == "dual_ar" and (folder / "tokenizer.json").exists():
        added = read_json(folder / "tokenizer.json").get("added_tokens")
        if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
            raise CheckpointError("tokenizer.json: holds no list of added_tokens")
        tokens = {str(entry.get("content")): entry["id"] for entry in added if isinstance(entry.get("id"), int)}
    return ModelConfig.from_dict(values, tokens)
