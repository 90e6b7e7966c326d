"""The language model of duetts-mini: data, packing, losses, trainer, samples."""
