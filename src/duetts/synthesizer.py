"""Text and voice in, PCM out: checks a request, cuts its text into pieces and has them spoken. No torch, no HTTP.

Every door (Python, command line, HTTP) comes through `Synthesizer.start`, so limits and text rules exist once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duetts.config import Limits, MediaConfig, VoicesConfig
from duetts.errors import EmptyGeneration, InvalidRequest
from duetts.habits import read_habits
from duetts.model_config import read_codec_config, read_model_config
from duetts.narration import Narration, Piece, Script, check_room
from duetts.service import Arriving
from duetts.text.arrival import ArrivingText
from duetts.text.normalize import check_language, check_words, normalize, respell
from duetts.text.pieces import cut
from duetts.text.prompt import CodedReference, build_prompt, voice_positions
from duetts.text.rules import clean_text, frames_bound, least_seconds, styled
from duetts.text.tokenizer import Tokenizer
from duetts.types import Address, Granularity, Int32, Sampling, Source, Speaker, SpeakerInfo, Speech, SpeechRequest, Utterance
from duetts.voices.consents import ConsentStore
from duetts.voices.fetch import Fetcher
from duetts.voices.library import BARE, SpokenClip, VoiceLibrary
from duetts.voices.reference import Clip, ReferenceCodes

CHUNK_LENGTH = 300  # UTF-8 bytes of a piece: about 20 s of English, and what the models were trained to say at once
SHORTEST_CHUNK_LENGTH = 50  # of pieces that must be shorter to fit the context
RECORDING_MIN_S, RECORDING_MAX_S = 0.01, 60.0  # of what the codec is asked to encode or decode by itself
CROWDED = "ref_text_does_not_fit"  # a transcript that takes at least twice as long as its clip lasts
STUCK_S = 3.0  # a speech that holds one semantic token for so long has lost its text

# What the model says in the clip that becomes its default voice, and how long that must last at least to be speech.
CLIP_TEXT = "The morning was cool and clear, so we walked to the market for bread and a few apples, and took the long way home."
SHORTEST_CLIP_S = 4.0

# Inclusive ranges of plain numbers in a request.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 1000),
    "repetition_penalty": (0.8, 2.0),
    "seed": (-(2**63), 2**63 - 1),
    "max_new_tokens": (1, 2**31),
    "chunk_length": (100, 1000),
    "initial_codec_chunk_frames": (0, 1000),
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
        "max_new_tokens": request.max_new_tokens if request.max_piece_frames is None else request.max_piece_frames,
        "chunk_length": request.chunk_length,
        "initial_codec_chunk_frames": request.first_chunk,
        "timeout": request.timeout_s,
    }
    for field, value in values.items():
        low, high = RANGES[field]
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"{field} is {value}; it must be between {low} and {high}", field=field, code="out_of_range")


@dataclass(frozen=True, slots=True)
class _Spoken:
    """What is said and by whom: the pieces, the clips that make the voice, its name, whether none was encoded now, and what
    is odd about it."""

    pieces: list[Piece]
    references: list[CodedReference]
    voice: str
    hit: bool | None
    warnings: tuple[str, ...] = ()


class Synthesizer:
    """The text side of one model, in front of one speaker."""

    def __init__(
        self,
        folder: Path,
        speaker: Speaker,
        limits: Limits | None = None,
        voices: VoicesConfig | None = None,
        media: MediaConfig | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._config = read_model_config(folder)
        self._codec = read_codec_config(folder)
        self._tokenizer = Tokenizer.load(folder, self._config)
        self._habits = read_habits(folder)
        self._speaker = speaker
        rate, codec_id = speaker.info.sample_rate, speaker.info.codec_id
        fetcher = Fetcher(media or MediaConfig(), self.limits)
        self._references = ReferenceCodes(speaker.encode_reference, rate, self.limits, codec_id, fetcher)
        recordings = replace(
            self.limits, reference_min_s=RECORDING_MIN_S, reference_max_s=RECORDING_MAX_S, reference_cache_bytes=0
        )  # fmt: skip
        self._recordings = ReferenceCodes(speaker.encode_reference, rate, recordings, fetcher=fetcher)
        voices = voices or VoicesConfig()
        self.voices = VoiceLibrary(voices, folder / "voices", speaker.info, self._references, self)
        place, limits = f"{str(voices.folder).rstrip('/')}/consents", self.limits
        self.consents = ConsentStore(place, voices.max_voices, limits.reference_bytes, limits.reference_queue)

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
            "voice_hits": self.voices.hits,
            "voice_misses": self.voices.misses,
        }

    async def prepare(self) -> None:
        """Makes the default voice ready, so that no request waits for it. Raises `ConfigError` if it does not exist."""
        await self.voices.prepare()

    async def close(self) -> None:
        self._references.close()
        self._recordings.close()
        self.voices.close()
        self.consents.close()
        await self._speaker.close()

    def arriving(self, granularity: Granularity, most: int) -> Arriving:
        """Text that will come bit by bit."""
        return ArrivingText(granularity, most)

    async def start(self, request: SpeechRequest) -> Speech:
        """Checks everything that can be checked, reads and encodes references, and gives back what will be spoken.

        Raises `InvalidRequest` naming field and limit. Nothing runs until the speech is iterated.
        """
        check_ranges(request)
        text = self._clean(request)
        style = request.instructions
        style = clean_text(style, field="instructions", max_chars=len(style), spoken=False)
        request = replace(request, instructions=style if request.tagged else "")
        spoken = await (self._cloned(request, text) if request.references else self._voiced(request, text))
        script = self._script(request, spoken.pieces, spoken.references)
        return Speech(
            Narration(self._speaker, script).speak(), request_id=request.request_id, seed=script.first.seed,
            input_tokens=script.input_tokens, sample_rate=self.info.sample_rate, num_pieces=len(spoken.pieces),
            input_audio_tokens=sum(codes.shape[1] for codes, _ in spoken.references), voice=spoken.voice,
            reference_hit=spoken.hit, warnings=spoken.warnings,
        )  # fmt: skip

    def _clean(self, request: SpeechRequest) -> str:
        """The text as it is to be said."""
        language, words, limit = check_language(request.language), request.pronunciation, self.limits.max_input_chars
        check_words(words)
        for said in words.values():
            clean_text(said, field="pronunciation", max_chars=len(said), spoken=False)
        text = clean_text(request.text, field="input", max_chars=limit)
        if not request.normalize and not words:
            return text
        text = normalize(text, language) if request.normalize else text
        return clean_text(respell(text, words), field="input", max_chars=limit)

    # -- the codec by itself

    async def codes_of(self, audio: Source, field: str) -> Int32:
        """Codes of a clip that may be shorter and longer than a reference."""
        clip = await self._recordings.decode(audio, field)
        return (await self._recordings.codes(clip)).codes

    async def sound_of(self, codes: Int32, field: str, request_id: str) -> bytes:
        """PCM of codes, which are checked first."""
        self._check_codes(codes, field)
        prompt = np.concatenate((np.zeros((1, codes.shape[1]), np.int32), codes))
        utterance = Utterance(request_id, prompt, self._habits.sampling, 0, 1, decode_only=True)
        speech = Speech(
            self._speaker.speak(utterance), request_id=request_id, seed=0, input_tokens=0, sample_rate=self.info.sample_rate
        )
        async with aclosing(speech):
            return b"".join([chunk.pcm async for chunk in speech])

    def _check_codes(self, codes: Int32, field: str) -> None:
        books, frames = codes.shape
        if books != self.info.num_codebooks:
            raise InvalidRequest(f"{field} has {books} codebooks; the model has {self.info.num_codebooks}", field=field)
        most = min(int(RECORDING_MAX_S * self.info.sample_rate / self.info.frame_length), self.info.max_model_len - 1)
        if not 1 <= frames <= most:
            raise InvalidRequest(
                f"{field} has {frames} frames; it must have between 1 and {most}", field=field, code="out_of_range"
            )
        for book, row in enumerate(codes):
            size = self._codec.residual_size if book else self._codec.semantic_size
            if row.min() < 0 or row.max() >= size:
                raise InvalidRequest(
                    f"{field} holds {row.min()}..{row.max()} in codebook {book}; 0..{size - 1} are allowed", field=field,
                    code="out_of_range",
                )  # fmt: skip

    async def _cloned(self, request: SpeechRequest, text: str) -> _Spoken:
        """The text in the voice of clips that came with the request."""
        transcripts = self._transcripts(request)
        silence = np.zeros((self.info.num_codebooks, 0), np.int32)
        voice = voice_positions(self._tokenizer, [(silence, transcript) for transcript in transcripts])
        self._cut(text, voice, request)
        check_room(self._speaker, request)
        clips = await self._decode_references(request)
        voice += sum(-(-clip.num_samples // self.info.frame_length) for clip in clips)
        pieces = self._cut(text, voice, request)
        found = [await self._references.codes(clip) for clip in clips]
        references = [(one.codes, transcript) for one, transcript in zip(found, transcripts, strict=True)]
        seconds = [clip.num_samples / self.info.sample_rate for clip in clips]
        crowded = any(least_seconds(text) > length for text, length in zip(transcripts, seconds, strict=True))
        return _Spoken(pieces, references, "", all(one.hit for one in found), (CROWDED,) if crowded else ())

    async def _voiced(self, request: SpeechRequest, text: str) -> _Spoken:
        """The text in a voice by name."""
        voice = await self.voices.choose(request.voice, request.voice_field, request.voice_or_default)
        references: list[CodedReference] = [(voice.codes, voice.transcript)] if voice else []
        pieces = self._cut(text, voice_positions(self._tokenizer, references), request)
        return _Spoken(pieces, references, voice.name if voice else BARE, voice.hit if voice else None)

    # -- what the voices ask the text side

    def clean_transcript(self, text: str | None) -> str:
        """The transcript of a clip as it is used. Raises `InvalidRequest`."""
        if text is None or not text.strip():
            raise InvalidRequest(
                "a voice needs its transcript: ref_text is missing or empty", field="ref_text",
                code="reference_text_required",
            )  # fmt: skip
        return clean_text(text, field="ref_text", max_chars=self.limits.max_input_chars)

    def check_room(self, codes: Int32, transcript: str) -> None:
        """Raises `InvalidRequest` when not even a word has room beside such a reference."""
        voice = voice_positions(self._tokenizer, [(codes, transcript)])
        word = self._piece("Hello.", SpeechRequest(""))
        needed, allowed = voice + self._positions(word.text) + word.max_frames, self.info.max_model_len
        if needed > allowed:
            raise InvalidRequest(
                f"clip and ref_text take {voice} positions and leave no room for speech; the model has {allowed}",
                field="ref_text", code="context_length_exceeded",
            )  # fmt: skip

    async def speak_clip(self, seed: int) -> SpokenClip | None:
        """A sentence in a voice of the model's own; None if it went wrong. Without trained weights any noise will do."""
        speech = await self.start(SpeechRequest(CLIP_TEXT, voice=BARE, seed=seed, request_id="default-voice"))
        try:
            chunks = [chunk async for chunk in speech]
        except EmptyGeneration:
            return None
        codes = np.concatenate([chunk.codes for chunk in chunks], axis=1)
        duration_s = codes.shape[1] * self.info.frame_length / self.info.sample_rate
        outcome = speech.outcome
        well = outcome is not None and outcome.reason == "stop" and not outcome.pieces.suspect
        if self.info.weights == "trained" and not (well and duration_s >= SHORTEST_CLIP_S):
            return None
        if not self.limits.reference_min_s <= duration_s <= self.limits.reference_max_s:
            return None
        return SpokenClip(b"".join(chunk.pcm for chunk in chunks), codes, CLIP_TEXT)

    # -- the pieces

    def _cut(self, text: str, voice: int, request: SpeechRequest) -> list[Piece]:
        """The pieces of a text, behind so many prompt positions of the voice. Whatever frames a piece may take, it fits
        without its predecessor. If the bounds that follow from the text do not fit, the pieces are made shorter.

        Raises `InvalidRequest` when nothing helps.
        """
        length = min(request.chunk_length or CHUNK_LENGTH, self._habits.longest_piece)
        while True:
            pieces = [self._piece(part, request) for part in cut(text, length)]
            sums = [(voice + self._positions(piece.text), piece.max_frames) for piece in pieces]
            positions, frames = max(sums, key=sum)
            own = request.max_new_tokens is not None
            needed, allowed = positions + frames, self.info.max_model_len
            if needed <= allowed:
                return pieces
            if own or length <= SHORTEST_CHUNK_LENGTH:
                raise InvalidRequest(
                    f"{positions} prompt positions and up to {frames} frames of audio need {needed} positions; "
                    f"the model has {allowed}",
                    field="max_new_tokens" if own else "input", code="context_length_exceeded",
                )  # fmt: skip
            length = max(SHORTEST_CHUNK_LENGTH, length * 3 // 4)

    def _piece(self, text: str, request: SpeechRequest) -> Piece:
        frame_rate = self.info.sample_rate / self.info.frame_length
        text = styled(" ".join(text.split()) if self._habits.single_line else text, request.instructions)
        most = min(self.limits.max_new_tokens, request.max_piece_frames or self.limits.max_new_tokens)
        return Piece(text, request.max_new_tokens or min(most, frames_bound(text, frame_rate)))

    def _positions(self, text: str) -> int:
        """What a text adds to the voice's positions, the turns around it included."""
        prompt = build_prompt(self._tokenizer, [], [], text)
        return int(prompt.shape[1]) - voice_positions(self._tokenizer, [])

    def _script(self, request: SpeechRequest, pieces: Sequence[Piece], references: Sequence[CodedReference]) -> Script:
        prompt = partial(build_prompt, self._tokenizer, references)
        trusted = self.info.weights == "trained" and request.max_new_tokens is None
        first = Utterance(
            request_id=request.request_id,
            prompt=prompt([], pieces[0].text),
            sampling=self._sampling(request),
            seed=self._seed(request),
            max_frames=pieces[0].max_frames,
            timeout_s=request.timeout_s,
            streaming=request.streaming,
            first_chunk=request.first_chunk,
            voice_key=_voice_key(references) or (secrets.token_hex(8) if len(pieces) > 1 else ""),
            shared_positions=voice_positions(self._tokenizer, references) if references else 0,
            max_repeats=round(STUCK_S * self.info.sample_rate / self.info.frame_length) if trusted else 0,
        )
        bare = self._positions("")
        later = sum(self._positions(piece.text) - bare for piece in pieces[1:])
        return Script(pieces, first, prompt, first.prompt.shape[1] + later, request.max_new_tokens, trusted,
                      request.conditioned and self._habits.conditioned, request.continues)  # fmt: skip

    def _seed(self, request: SpeechRequest) -> int:
        if request.continues is not None:
            return request.continues.seed
        return secrets.randbits(63) if request.seed is None else request.seed

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
        clips = [await self._read_reference(reference.audio, reference.origin) for reference in request.references]
        total = sum(clip.num_samples for clip in clips) / self.info.sample_rate
        if total > self.limits.references_total_s:
            raise InvalidRequest(
                f"the references last {total:.1f} s together; at most {self.limits.references_total_s:g} s are allowed",
                field="references", code="reference_too_long",
            )  # fmt: skip
        return clips

    async def _read_reference(self, source: Source | Int32, field: str) -> Clip:
        """A clip, or what is known of one whose codes came with the request."""
        if isinstance(source, bytes | Address):
            return await self._references.decode(source, field)
        self._check_codes(source, "references.vq_codes")
        seconds = source.shape[1] * self.info.frame_length / self.info.sample_rate
        low, high = self.limits.reference_min_s, self.limits.reference_max_s
        if not low <= seconds <= high:
            raise InvalidRequest(
                f"references.vq_codes last {seconds:.2f} s; between {low:g} and {high:g} s are allowed", field="references",
                code="reference_too_short" if seconds < low else "reference_too_long",
            )  # fmt: skip
        return Clip("", source.shape[1] * self.info.frame_length, codes=source)

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
        return replace(self._habits.sampling, **changes)


def _voice_key(references: Sequence[CodedReference]) -> str:
    """The same for the same codes and transcripts, empty without any."""
    parts = [part for codes, transcript in references for part in (codes.tobytes(), transcript.encode())]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest() if parts else ""
