"""Very small dimensions for tests that need modules or files but no meaning."""

from typing import Any

TEXT: dict[str, Any] = {
    "n_layer": 2, "dim": 32, "n_head": 4, "n_local_heads": 2, "head_dim": 16, "intermediate_size": 48, "max_seq_len": 1024,
    "rope_base": 10000, "norm_eps": 1e-6, "attention_qk_norm": True, "tie_word_embeddings": True,
}  # fmt: skip
AUDIO: dict[str, Any] = {
    "n_layer": 1, "dim": 24, "text_dim": 32, "n_head": 2, "n_local_heads": 1, "head_dim": 16, "intermediate_size": 40,
    "num_codebooks": 4, "vocab_size": 64, "attention_qk_norm": False,
}  # fmt: skip
CODEC: dict[str, Any] = {
    "encoder_dim": 2, "encoder_rates": [2, 4, 8, 8], "encoder_transformer_layers": [0, 0, 0, 1],
    "encoder_transformer_head_dim": 16, "encoder_transformer_window": 24, "latent_dim": 32, "decoder_dim": 32,
    "decoder_rates": [8, 8, 4, 2], "downsample_factor": [2, 2], "codebook_dim": 8, "semantic_codebook_size": 64,
    "residual_codebook_size": 32, "n_residual_codebooks": 3, "pre_module_layers": 1, "post_module_layers": 2,
    "quantizer_transformer": {"n_layer": 2, "n_head": 2, "head_dim": 16, "intermediate_size": 48, "window": 16},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "fish_qwen3_omni", "dtype": "float32", "eos_token_id": 40, "semantic_start_token_id": 48,
    "semantic_end_token_id": 111, "text_config": {"vocab_size": 128, **TEXT}, "audio_decoder_config": AUDIO,
}  # fmt: skip
