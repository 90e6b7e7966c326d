"""The tiny model: a complete, very small model folder of random weights whose end token is likely enough to be met."""

from duetts.embedded import Recipe

from .dimensions import AUDIO, CODEC, TEXT

TINY = Recipe(text=TEXT, audio=AUDIO, codec=CODEC, seed=3, end_scale=2.0, std=0.18, dtype="float32")
