"""duetts: a speech server for dual-AR text-to-speech models. `TTS` speaks from Python; `duetts serve` serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duetts.tts import TTS, Audio

__version__ = "0.1.0"
__all__ = ["TTS", "Audio", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads the Python door only when it is used, so that servers and tools start without torch."""
    if name in ("TTS", "Audio"):
        from duetts import tts

        return getattr(tts, name)
    raise AttributeError(f"module 'duetts' has no attribute {name!r}")
