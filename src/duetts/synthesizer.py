"""Text and voice in, PCM out: checks a request, lays out its prompt and hands it to a speaker. No torch, no HTTP.

Every door (Python, command line, HTTP) comes through `Synthesizer.start`, so limits and text rules exist once.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from duetts.config import Limits
from duetts.errors import EmptyGeneration, InvalidRequest
from duetts.model_config import read_model_config, read_sampling
from duetts.text.prompt import build_prompt
from duetts.text.rules import clean_text, frames_bound
from duetts.text.tokenizer import Tokenizer
from duetts.types import (
    Chunk,
    Int32,
    Outcome,
    Sampling,
    Speaker,
    SpeakerInfo,
    Speech,
    SpeechRequest,
    Utterance,
)
from duetts.voices.reference import Clip, ReferenceCodes

# Inclusive ranges of plain numbers in a request.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 1000),
    "repetition_penalty": (0.8, 2.0),
    "seed": (-(2**63), 2**63 - 1),
    "max_new_tokens": (1, 2**31),
    "timeout": (0.001, 86400.0),
}


def check_ranges(request: SpeechRequest) -> None:
    """Refuses numbers out of range, naming field and limits."""
    values = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "repetition_penalty": request.repetition_penalty,
        "seed": request.seed,
        "max_new_tokens": request.max_new_tokens,
        "timeout": request.timeout_s,
    }
    for field, value in values.items():
        low, high = RANGES[field]
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"{field} is {value}; it must be between {low} and {high}", field=field, code="out_of_range")


class Synthesizer:
    """The text side of one model, in front of one speaker."""

    def __init__(self, folder: Path, speaker: Speaker, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._config = read_model_config(folder)
        self._tokenizer = Tokenizer.load(folder, self._config)
        self._defaults = read_sampling(folder)
        self._speaker = speaker
        rate, codec_id = speaker.info.sample_rate, speaker.info.codec_id
        self._references = ReferenceCodes(speaker.encode_reference, rate, self.limits, codec_id)

    @property
    def info(self) -> SpeakerInfo:
        return self._speaker.info

    def stats(self) -> dict[str, Any]:
        return {
            **self._speaker.stats(),
            "reference_hits": self._references.hits,
            "reference_misses": self._references.misses,
            "reference_disk_hits": self._references.disk_hits,
            "reference_bytes": self._references.num_bytes,
        }

    async def close(self) -> None:
        self._references.close()
        await self._speaker.close()

    async def start(self, request: SpeechRequest) -> Speech:
        """Checks everything that can be checked, reads and encodes references, and gives back what will be spoken.

        Raises `InvalidRequest` naming field and limit. Nothing runs until the speech is iterated.
        """
        check_ranges(request)
        text = clean_text(request.text, field="input", max_chars=self.limits.max_input_chars)
        transcripts = self._transcripts(request)
        max_frames = request.max_new_tokens or min(self.limits.max_new_tokens, frames_bound(text, self._frame_rate))
        silence = np.zeros((self.info.num_codebooks, 0), np.int32)
        positions = self._prompt([(silence, transcript) for transcript in transcripts], text).shape[1]
        self._check_length(positions, max_frames, request)
        clips = await self._decode_references(request)
        positions += sum(-(-clip.num_samples // self.info.frame_length) for clip in clips)
        self._check_length(positions, max_frames, request)
        codes = [(await self._references.codes(clip)).codes for clip in clips]
        prompt = self._prompt(list(zip(codes, transcripts, strict=True)), text)
        utterance = Utterance(
            request_id=request.request_id,
            prompt=prompt,
            sampling=self._sampling(request),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            max_frames=max_frames,
            timeout_s=request.timeout_s,
            streaming=request.streaming,
        )
        return Speech(
            self._speak(utterance), request_id=request.request_id, seed=utterance.seed, input_tokens=prompt.shape[1],
            sample_rate=self.info.sample_rate, input_audio_tokens=sum(block.shape[1] for block in codes),
        )  # fmt: skip

    async def _speak(self, utterance: Utterance) -> AsyncGenerator[Chunk | Outcome, None]:
        """The speaker's items. If nothing at all came out there is a second try; its seed follows from the first one's, so
        that the seed that was sent or is reported gives the same audio again."""
        async with aclosing(self._speaker.speak(utterance)) as items:
            async for item in items:
                if isinstance(item, Outcome) and isinstance(item.error, EmptyGeneration):
                    break
                yield item
            else:
                return
        async with aclosing(self._speaker.speak(replace(utterance, seed=utterance.seed ^ 1))) as items:
            async for item in items:
                yield item

    @property
    def _frame_rate(self) -> float:
        return self.info.sample_rate / self.info.frame_length

    def _prompt(self, references: list[tuple[Int32, str]], text: str) -> Int32:
        return build_prompt(self._tokenizer, references, [], text)

    def _transcripts(self, request: SpeechRequest) -> list[str]:
        limit = self.limits.max_references
        if len(request.references) > limit:
            raise InvalidRequest(
                f"{len(request.references)} references are given; at most {limit} are allowed", field="references",
                code="out_of_range",
            )  # fmt: skip
        for reference in request.references:
            if not reference.text.strip():
                raise InvalidRequest(
                    "a reference needs its transcript: ref_text is missing or empty", field="ref_text",
                    code="reference_text_required",
                )  # fmt: skip
        return [
            clean_text(reference.text, field="ref_text", max_chars=self.limits.max_input_chars)
            for reference in request.references
        ]

    async def _decode_references(self, request: SpeechRequest) -> list[Clip]:
        clips = [await self._references.decode(reference.audio, "ref_audio") for reference in request.references]
        total = sum(clip.num_samples for clip in clips) / self.info.sample_rate
        if total > self.limits.references_total_s:
            raise InvalidRequest(
                f"the references last {total:.1f} s together; at most {self.limits.references_total_s:g} s are allowed",
                field="references", code="reference_too_long",
            )  # fmt: skip
        return clips

    def _check_length(self, positions: int, max_frames: int, request: SpeechRequest) -> None:
        needed, allowed = positions + max_frames, self.info.max_model_len
        if needed > allowed:
            own = request.max_new_tokens is not None
            raise InvalidRequest(
                f"{positions} prompt positions and up to {max_frames} frames of audio need {needed} positions; "
                f"the model has {allowed}",
                field="max_new_tokens" if own else "input", code="context_length_exceeded",
            )  # fmt: skip

    def _sampling(self, request: SpeechRequest) -> Sampling:
        given = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "repetition_penalty": request.repetition_penalty,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "temperature" in changes:
            changes["residual_temperature"] = None  # a request's temperature is for all codebooks
        return replace(self._defaults, **changes)
