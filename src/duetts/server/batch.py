"""POST /v1/audio/speech/batch: many texts in one body, a result for each. One bad item does not fail the rest.

All items are read and checked, and their clips encoded, before anything is spoken. Then at most `AT_ONCE` are spoken or wait to
be sent: a slow reader stops the work, and no more results than that are held. The status waits for the first item that is
spoken. A full engine refuses the batch as long as nothing of it was taken; after that its items wait for their turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from duetts.audio.formats import FORMATS
from duetts.config import Limits, ServerConfig
from duetts.errors import Aborted, DuettsError, InvalidRequest, NotReady, Overloaded
from duetts.server.batch_answers import Result, choose_answer
from duetts.server.body import FORM, JSON, MSGPACK, read_body
from duetts.server.caller import Caller
from duetts.server.errors import error_object
from duetts.server.outcomes import Outcomes
from duetts.server.references import CLIP_KEYS, read_clip
from duetts.server.rendition import Rendition
from duetts.server.schemas import SpeechOrder, is_text, read_order, speech_schema
from duetts.server.speech import Listening, Stream
from duetts.service import SpeechService
from duetts.types import Source, Speech

AT_ONCE = 16
PATIENCE_S = 60.0  # that an item waits for a full engine
RETRY_S = 1.0
# Fields that say the same thing in two ways: an item's replaces the default's, whichever of the two it is.
RIVALS = {
    "voice": ("speaker", "reference_id"), "speaker": ("voice", "reference_id"), "reference_id": ("voice", "speaker"),
    "references": ("ref_audio", "ref_text"), "ref_audio": ("references",), "ref_text": ("references",),
    "volume": ("volume_multiplier",), "volume_multiplier": ("volume",),
}  # fmt: skip
PARTNERS = {"ref_text": "ref_audio", "ref_audio": "ref_text"}  # the lack of one is the fault of the other


@dataclass(slots=True)
class Item:
    """One item: what it asks for, what the synthesizer made of it, or why it cannot be spoken. `own` fields are no defaults."""

    index: int
    own: frozenset[str]
    order: SpeechOrder | None = None
    speech: Speech | None = None
    error: DuettsError | None = None


def batch_router(service: SpeechService, config: ServerConfig, outcomes: Outcomes) -> APIRouter:
    """The route of batches."""
    router = APIRouter()
    schema = {"schema": batch_schema(config.limits.batch_items)}
    body = {"required": True, "content": dict.fromkeys((JSON, MSGPACK, FORM), schema)}

    @router.post("/v1/audio/speech/batch", response_class=Response, openapi_extra={"requestBody": body})
    async def speak_batch(request: Request) -> Response:
        """Speak many texts. `Accept` chooses JSON, NDJSON (each result when it is there), multipart/mixed or a ZIP file."""
        fields = await read_body(request, config.limits.max_body_bytes, lambda name: name != "items" and is_text(name))
        batch_id = request.state.speech_id.replace("speech-", "speech-batch-", 1)
        items = read_items(fields, config, service.info.sample_rate, batch_id)
        request.state.take(len(items) - 1)
        async with AsyncExitStack() as closing:
            listening = Listening(request.receive)
            closing.callback(listening.close)
            outcomes.begin(batch_id, listening.caller)
            closing.callback(outcomes.forget, batch_id)
            batch = Batch(service, items, listening.caller, outcomes)
            closing.push_async_callback(batch.close)
            await batch.check()
            refuse_defaults(items, fields)
            answer = choose_answer(request.headers.get("accept", ""))
            results = batch.results(in_order=not answer.as_ready)
            closing.push_async_callback(results.aclose)
            written = answer.write(batch_id, _joined(await _until_spoken(results), results))
            closing.push_async_callback(written.aclose)
            content_type = answer.content_type.format(id=batch_id)
            headers = {"Content-Type": content_type, "Cache-Control": "no-store", "X-Speech-Id": batch_id}
            return Stream(headers, written, closing.pop_all())

    return router


# -- bodies --------------------------------------------------------------------------------------------------------------


def read_items(fields: dict[str, Any], config: ServerConfig, sample_rate: int, batch_id: str) -> list[Item]:
    """The items of a body, checked as far as the server can. Raises `InvalidRequest` if none could be used."""
    entries = _read_entries(fields, config.limits)
    defaults = {name: value for name, value in fields.items() if name != "items" and value is not None}
    clips: dict[str, Source] = {}

    def read(index: int, body: dict[str, Any]) -> SpeechOrder:
        shared = with_shared_clips(body, clips, config.limits.reference_bytes)
        return read_order(shared, config, sample_rate, f"{batch_id}-{index}")

    items = [_read_item(index, entry, defaults, partial(read, index)) for index, entry in enumerate(entries)]
    refuse_defaults(items, fields)
    return items


def _read_entries(fields: dict[str, Any], limits: Limits) -> list[Any]:
    entries = fields.get("items")
    if entries is None:
        raise InvalidRequest("items, a list of requests, is missing", field="items", code="missing_field")
    if not isinstance(entries, list):
        raise InvalidRequest("items must be a list", field="items", code="invalid_type")
    if not 1 <= len(entries) <= limits.batch_items:
        raise InvalidRequest(
            f"items has {len(entries)} entries; it must have between 1 and {limits.batch_items}", field="items",
            code="out_of_range",
        )  # fmt: skip
    for path, body in [("", fields), *((f"items.{index}.", entry) for index, entry in enumerate(entries))]:
        for name in ("stream", "stream_format"):
            if isinstance(body, dict) and body.get(name):
                raise InvalidRequest(f"{name} has no meaning in a batch", field=path + name, code="unsupported_field")
    return entries


def _read_item(index: int, entry: Any, defaults: dict[str, Any], read: Callable[[dict[str, Any]], SpeechOrder]) -> Item:
    if not isinstance(entry, dict):
        error = InvalidRequest("every one of items must be an object", field=f"items.{index}", code="invalid_type")
        return Item(index, frozenset(), error=error)
    own = {name: value for name, value in entry.items() if value is not None}
    item = Item(index, frozenset(own))
    replaced = {rival for name in own for rival in RIVALS.get(name, ())}
    try:
        item.order = read({name: value for name, value in defaults.items() if name not in replaced} | own)
    except InvalidRequest as error:
        item.error = error
    return item


def with_shared_clips(body: dict[str, Any], clips: dict[str, Source], max_bytes: int) -> dict[str, Any]:
    """The body with clips that are text, but for addresses, replaced by their bytes. Each distinct text is decoded once, into
    `clips`."""

    def shared(value: Any, field: str) -> Any:
        if isinstance(value, str):
            clip = clips[value] if value in clips else clips.setdefault(value, read_clip(value, field, max_bytes))
            return clip if isinstance(clip, bytes) else value
        return value

    def entry_shared(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        return {key: shared(value, "references") if key in CLIP_KEYS else value for key, value in entry.items()}

    audio, references = body.get("ref_audio"), body.get("references")
    if isinstance(audio, str | list):
        own = [shared(clip, "ref_audio") for clip in audio] if isinstance(audio, list) else shared(audio, "ref_audio")
        body = {**body, "ref_audio": own}
    if isinstance(references, list):
        body = {**body, "references": [entry_shared(entry) for entry in references]}
    return body


def refuse_defaults(items: list[Item], defaults: dict[str, Any]) -> None:
    """Raises the first item's error if every item stumbles over a default, so that nothing can be spoken."""
    for item in items:
        field = item.error.field if isinstance(item.error, InvalidRequest) else None
        if not any(name in defaults and name not in item.own for name in (field, PARTNERS.get(field or ""))):
            return
    assert items[0].error is not None, "every item has an error"
    raise items[0].error


def batch_schema(most: int) -> dict[str, Any]:
    """The JSON schema of a body, for OpenAPI."""
    item = speech_schema()
    items = {"type": "array", "minItems": 1, "maxItems": most, "items": item, "description": "Requests, one a result."}
    note = "All other fields are those of a speech request, as defaults of the items."
    return {"type": "object", "required": ["items"], "properties": {"items": items} | item["properties"], "description": note}


# -- speaking ------------------------------------------------------------------------------------------------------------


class Batch:
    """The items of one body while they are checked and spoken. Close it at the end."""

    def __init__(self, service: SpeechService, items: list[Item], caller: Caller, outcomes: Outcomes) -> None:
        self._service, self._items = service, items
        self._caller, self._outcomes = caller, outcomes
        self._taken = False  # whether the engine has spoken for an item
        self._tasks: set[asyncio.Task[Result]] = set()

    async def check(self) -> None:
        """Checks every item completely and encodes its clips. Raises if there is no room: nothing was spoken yet."""
        await self._caller.unless_gone(self._start_all())
        for item in self._items:
            if isinstance(item.error, Overloaded | NotReady):
                raise item.error

    async def results(self, *, in_order: bool) -> AsyncGenerator[Result, None]:
        """A result for each item: in the order of the items, or as they come."""
        following = iter(self._items)
        done: dict[int, Result] = {}
        num_given = 0
        while num_given < len(self._items):
            for item in islice(following, AT_ONCE - len(self._tasks) - len(done)):
                self._tasks.add(asyncio.ensure_future(self._result(item)))
            finished, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = [error for task in finished if (error := task.exception()) is not None]  # all are looked at
            if failed:
                raise failed[0]
            done |= {task.result().index: task.result() for task in finished}
            for index in sorted(done):
                if in_order and index != num_given:
                    break
                yield done.pop(index)
                num_given += 1

    async def close(self) -> None:
        """Ends what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for item in self._items:
            if item.speech is not None:
                await item.speech.aclose()

    async def _start_all(self) -> None:
        outcomes = await asyncio.gather(*(self._start(item) for item in self._items), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _start(self, item: Item) -> None:
        if item.order is None:
            return
        try:
            item.speech = await self._service.start(item.order.request)
        except DuettsError as error:
            item.error = error

    async def _result(self, item: Item) -> Result:
        if item.error is None:
            try:
                return await self._speak_in_turn(item)
            except (Aborted, Overloaded, NotReady):
                raise
            except DuettsError as error:
                item.error = error
        return Result(item.index, {"error": error_object(item.error)})

    async def _speak_in_turn(self, item: Item) -> Result:
        """The result. While the engine is full, tries again and again; raises what it says if it has taken nothing so far."""
        patient_until = time.monotonic() + PATIENCE_S
        leads = item is next(other for other in self._items if other.error is None)
        while True:
            try:
                return await self._speak(item)
            except (Overloaded, NotReady) as error:
                if leads and not self._taken:
                    raise
                if isinstance(error, NotReady) or time.monotonic() > patient_until:
                    return Result(item.index, {"error": error_object(error)})
                await self._caller.unless_gone(asyncio.sleep(min(RETRY_S, error.retry_after_s)))

    async def _speak(self, item: Item) -> Result:
        order, speech = item.order, item.speech
        assert order is not None, "an item without an error has an order"
        item.speech = None  # spoken once
        starting = self._service.start(order.request) if speech is None else _already(speech)
        async with await Rendition.open(order, starting, self._caller, self._outcomes) as rendition:
            self._taken = True
            audio = await rendition.complete()
            rate = order.output.sample_rate
            fields = {
                "id": order.request.request_id,
                "format": order.output.format,
                "media_type": FORMATS[order.output.format].content_type.format(rate=rate),
                "sample_rate": rate,
                **rendition.summary(),
                "seed": rendition.speech.seed,
                "voice": rendition.speech.voice or None,
                "ignored_fields": list(order.ignored) or None,
                "warnings": list(rendition.speech.warnings) or None,
            }
            return Result(item.index, fields, audio)


async def _already(speech: Speech) -> Speech:
    return speech


async def _until_spoken(results: AsyncIterator[Result]) -> list[Result]:
    """The results up to the first with audio: whether the engine takes the batch is known then."""
    early: list[Result] = []
    async for result in results:
        early.append(result)
        if result.audio is not None:
            break
    return early


async def _joined(early: list[Result], results: AsyncIterator[Result]) -> AsyncIterator[Result]:
    for result in early:
        yield result
    async for result in results:
        yield result
