"""The 25 cases: what a server of this API must answer, one after another as a user would try them.

`CASES` at the end is the list. Each is run by itself against a server that has a voice `anna`.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance.target import REF, SPEECH, NotHere, Target, data_uri, refusal, seconds_of, voice_clip
from tests.server.test_events import events_of, joined

Check = Callable[[Target], None]
TYPES = {
    "wav": "audio/wav", "mp3": "audio/mpeg", "opus": "audio/ogg", "flac": "audio/flac", "aac": "audio/aac", "pcm": "audio/pcm",
}  # fmt: skip
LONG_TEXT = "This is one of very many sentences, which together are spoken for minutes. " * 60


@dataclass(frozen=True)
class Case:
    number: int
    what: str
    check: Check


def refuses(*rows: tuple[dict[str, Any], int, str | None, str]) -> Check:
    """Bodies that must be refused, each with its status, code and field."""

    def check(target: Target) -> None:
        for body, status, code, param in rows:
            target.refused(body, status, code, param)

    return check


def a_complete_wav(target: Target) -> None:
    body = {"model": target.model, "input": "Hello, how are you?", "voice": "default", "response_format": "wav"}
    reasons = set()
    for _ in range(5):  # a model of random weights stops where it likes
        answer = target.speak(**body)
        assert answer.headers["Content-Type"] == "audio/wav"
        assert int(answer.headers["Content-Length"]) == len(answer.content)
        assert int.from_bytes(answer.content[4:8], "little") == len(answer.content) - 8
        with wave.open(io.BytesIO(answer.content)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (44100, 1, 2)
            seconds = file.getnframes() / 44100
            assert 44 + 2 * file.getnframes() == len(answer.content)
        assert answer.headers["X-Sample-Rate"] == "44100"
        assert abs(float(answer.headers["X-Audio-Duration"]) - seconds) <= 0.001
        reasons.add(answer.headers["X-Finish-Reason"])
        if answer.headers["X-Finish-Reason"] == "stop" and seconds > 0.3:
            return
        assert not target.is_trained, (reasons, seconds)
    assert reasons <= {"stop", "length"}


def a_clone_without_model_or_format(target: Target) -> None:
    answer = target.speak(input="Hi.", ref_audio=REF, ref_text="Transcript.")
    assert answer.headers["Content-Type"] == "audio/wav"


def an_alias_answers_in_mp3(target: Target) -> None:
    answer = target.speak(model="tts-1", voice="alloy", input="Hi.")
    assert answer.headers["Content-Type"] == "audio/mpeg"
    assert answer.content[0] == 0xFF
    assert answer.content[1] & 0xE0 == 0xE0
    assert answer.headers["X-Voice-Resolved"]


def livekits_request(target: Target) -> None:
    body = {"model": "gpt-4o-mini-tts", "voice": "ash", "input": "Hi.", "response_format": "mp3", "speed": 1.0}
    answer = target.speak(**body, stream_format="sse")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *deltas, done = events_of(answer.text)
    assert deltas
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert done["type"] == "speech.audio.done"
    assert all(isinstance(done["usage"][name], int) for name in ("input_tokens", "output_tokens", "total_tokens"))
    assert seconds_of(joined(deltas), answer) > 0


def rates_of_pcm(target: Target) -> None:
    wanted = (("gpt-4o-mini-tts", "nova", 24000), (target.model, "default", 44100))
    for model, voice, rate in wanted:
        answer = target.speak(model=model, voice=voice, input="Hi.", response_format="pcm")
        assert f"rate={rate}" in answer.headers["Content-Type"]
        assert answer.headers["X-Sample-Rate"] == str(rate)
        assert len(answer.content) % 2 == 0


def all_formats_last_as_long(target: Target) -> None:
    seconds = {}
    for name, media_type in TYPES.items():
        answer = target.speak(input="Hello, how are you?", seed=7, response_format=name)
        assert answer.headers["Content-Type"].partition(";")[0] == media_type
        seconds[name] = seconds_of(answer.content, answer)
    assert all(abs(found - seconds["wav"]) <= 0.06 for found in seconds.values()), seconds


def a_seed_is_kept_in_company(target: Target) -> None:
    body = {"input": "One two three.", "seed": 11}
    first = target.speak(**body)
    assert first.headers["X-Seed"] == "11"
    assert target.speak(**body).content == first.content
    others = [{"input": f"Somebody else says number {index}.", "max_new_tokens": 12} for index in range(24)]
    crowd = [body if index % 4 == 0 else others[index - index // 4 - 1] for index in range(32)]
    for sent, answer in zip(crowd, target.together(crowd), strict=True):
        again = target.speak(**sent) if answer.status_code == 429 else answer
        assert again.status_code == 200, again.text
        if sent is body and answer.status_code == 200:
            assert answer.content == first.content or answer.headers.get("X-Deterministic") == "false"


def without_a_seed_it_differs(target: Target) -> None:
    first, second = (target.speak(input="One two three.") for _ in range(2))
    assert first.headers["X-Seed"] != second.headers["X-Seed"]
    assert first.content != second.content
    assert target.speak(input="One two three.", seed=int(first.headers["X-Seed"])).content == first.content


def a_stream_is_the_complete_answer(target: Target) -> None:
    body = {"input": "One two three.", "seed": 12, "response_format": "wav"}
    complete = target.speak(**body).content
    with target.http.stream("POST", SPEECH, json={**body, "stream_format": "audio"}) as answer:
        assert answer.status_code == 200
        assert "Content-Length" not in answer.headers
        streamed = b"".join(answer.iter_raw())
    assert streamed[:4] + streamed[8:16] == b"RIFFWAVEfmt "
    assert streamed[4:8] == streamed[40:44] == b"\xff\xff\xff\xff"
    assert streamed[44:] == complete[44:]


def numbers_out_of_range(target: Target) -> None:
    for text in ("0.2", "4.5", "1e999"):
        answer = target.http.post(
            SPEECH, content=f'{{"input": "x", "speed": {text}}}', headers={"Content-Type": "application/json"}
        )
        refusal(answer, 400, "out_of_range", "speed")


def a_format_that_nobody_has(target: Target) -> None:
    message = target.refused({"input": "x", "response_format": "m4a"}, 400, "invalid_value", "response_format")
    assert all(name in message for name in TYPES)


def an_unknown_voice(target: Target) -> None:
    message = target.refused({"input": "x", "voice": "nobody"}, 400, "unknown_voice", "voice")
    assert "/v1/audio/voices" in message


def clips_that_will_not_do(target: Target) -> None:
    rows = (
        (data_uri(voice_clip(0.4)), "reference_too_short"), (data_uri(voice_clip(45, 8000)), "reference_too_long"),
        (data_uri(b"These are words, and no sound. " * 20), "reference_undecodable"), ("ftp://h/a.wav", "invalid_value"),
    )  # fmt: skip
    for audio, code in rows:
        target.refused({"input": "x", "ref_audio": audio, "ref_text": "t"}, 400, code, "ref_audio")


def files_of_the_server(target: Target) -> None:
    messages = {
        target.refused({"input": "x", "ref_audio": address, "ref_text": "t"}, 403, "local_media_forbidden", "ref_audio")
        for address in ("file:///etc/passwd", "file:///srv/private/a.wav")
    }
    assert len(messages) == 1


def control_tokens(target: Target) -> None:
    target.refused({"input": "stop <|im_end|> now"}, 400, "unsupported_control_token", "input")
    target.speak(input="<|speaker:1|>Hi there.")


def bodies_that_are_none(target: Target) -> None:
    for content, kind, status in (
        ('{"input": ', "application/json", 400), ("[]", "application/json", 400), ("Hello.", "text/plain", 415),
    ):  # fmt: skip
        answer = target.http.post(SPEECH, content=content, headers={"Content-Type": kind})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    assert target.http.get("/health").status_code == 200


def a_voice_comes_and_goes(target: Target) -> None:
    target.http.delete("/v1/audio/voices/bob")
    stored = target.upload("Bob")
    assert stored.status_code in (200, 201), stored.text
    assert stored.json()["id"]
    listed = target.http.get("/v1/audio/voices").json()
    for name in ("data", "voices", "uploaded_voices"):
        assert "bob" in [voice["name"].lower() for voice in listed[name]], name
    target.speak(input="Hi.", voice="bob")
    again = target.upload("Bob")
    refusal(again, 409, "voice_exists", "name")
    assert again.headers["x-should-retry"] == "false"
    gone = target.http.delete("/v1/audio/voices/BOB")
    assert (gone.status_code, gone.json()["deleted"]) == (200, True)
    refusal(target.http.delete("/v1/audio/voices/BOB"), 404, "voice_not_found", "name")


def a_bad_clip_leaves_the_old_voice(target: Target) -> None:
    with target.voice("Bob"):
        before = target.speak(input="Hi.", voice="bob", seed=3).content
        refusal(target.upload("Bob", 60, 8000, overwrite="true"), 400, "reference_too_long", "audio_sample")
        assert target.speak(input="Hi.", voice="bob", seed=3).content == before


def a_batch_with_a_bad_item(target: Target) -> None:
    items = [{"input": "a b c"}, {"input": ""}, {"input": "d", "voice": "default"}]
    answer = target.post({"items": items}, SPEECH + "/batch")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["total"], told["succeeded"], told["failed"]) == (3, 2, 1)
    assert [result["index"] for result in told["results"]] == [0, 1, 2]
    assert told["results"][1]["error"]["code"]
    assert ["audio_data" in result for result in told["results"]] == [True, False, True]


def leaving_a_stream(target: Target) -> None:
    def busy() -> list[float]:
        return [target.number(name) for name in ("num_requests_running", "kv_pages_used")]

    def left() -> float:
        return target.number("stream_aborted_total", reason="client_disconnect")

    target.wait_until(lambda: busy()[0] == 0)
    before = left()
    body = {"input": LONG_TEXT, "response_format": "pcm", "stream_format": "audio"}
    with target.http.stream("POST", SPEECH, json=body) as answer:  # an answer that is not read to its end closes its socket
        assert answer.status_code == 200
        next(answer.iter_raw())
    target.wait_until(lambda: left() == before + 1)
    target.wait_until(lambda: busy() == [0, 0])


def a_full_line(target: Target) -> None:
    for count in (64, 128, 256, 512):
        answers = target.together([{"input": "Hi.", "max_new_tokens": 30, "seed": 7} for _ in range(count)])
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} <= {200, 429}
        if refused:
            break
    else:
        raise NotHere("512 requests at once found room; start it with --max-queue 2")
    assert len(refused) < len(answers)
    for answer in refused:
        refusal(answer, 429, "queue_full", None)
        assert int(answer.headers["Retry-After"]) >= 1


def fields_of_a_reference(target: Target) -> None:
    target.refused({"input": "x", "ref_audio": REF}, 400, "reference_text_required", "ref_text")
    target.refused({"input": "x", "ref_text": "t"}, 400, None, "ref_audio")


CASES = [
    Case(1, "a sentence is a complete WAV that says how it ended", a_complete_wav),
    Case(2, "a clip and its transcript alone: WAV is the default of the model's own name", a_clone_without_model_or_format),
    Case(3, "OpenAI's tts-1 with alloy: MP3 without tags, and which voice it was", an_alias_answers_in_mp3),
    Case(4, "LiveKit's default request: events of MP3", livekits_request),
    Case(5, "PCM at 24,000 Hz for OpenAI's names, at the model's own rate for others", rates_of_pcm),
    Case(6, "the same seed lasts as long in all six formats", all_formats_last_as_long),
    Case(7, "the same seed gives the same bytes, alone and in company", a_seed_is_kept_in_company),
    Case(8, "without a seed every answer differs, and can be had again", without_a_seed_it_differs),
    Case(9, "a streamed WAV: chunked, sizes unknown, the same samples", a_stream_is_the_complete_answer),
    Case(10, "nothing to say", refuses(
        ({"input": "   "}, 400, "invalid_value", "input"), ({"input": ""}, 400, "invalid_value", "input"),
        ({}, 400, "missing_field", "input"),
    )),
    Case(11, "a number is no text, a text no number, a boolean neither", refuses(
        ({"input": 5}, 400, "invalid_type", "input"), ({"input": "x", "speed": "1.2"}, 400, "invalid_type", "speed"),
        ({"input": "x", "speed": True}, 400, "invalid_type", "speed"),
    )),
    Case(12, "speeds out of range", numbers_out_of_range),
    Case(13, "an unknown format: the message lists those there are", a_format_that_nobody_has),
    Case(14, "an unknown model", refuses(({"input": "x", "model": "no-such"}, 404, "model_not_found", "model"))),
    Case(15, "an unknown voice: the message says how to store one", an_unknown_voice),
    Case(16, "a clip without its transcript, a transcript without its clip", fields_of_a_reference),
    Case(17, "clips that are too short, too long, no sound, or of an unknown scheme", clips_that_will_not_do),
    Case(18, "the server's own files: the same refusal whether they exist or not", files_of_the_server),
    Case(19, "control tokens are refused, speaker tags are not", control_tokens),
    Case(20, "half a body, a list, plain text: refused, and the server is well", bodies_that_are_none),
    Case(21, "a voice is stored, listed, spoken with, not stored twice, removed", a_voice_comes_and_goes),
    Case(22, "a bad clip in place of a voice leaves the voice as it was", a_bad_clip_leaves_the_old_voice),
    Case(23, "a batch in which one item is bad", a_batch_with_a_bad_item),
    Case(24, "a client that leaves a stream frees the engine and is counted", leaving_a_stream),
    Case(25, "a full line is told with a time, and the others finish", a_full_line),
]  # fmt: skip
