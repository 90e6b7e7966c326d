"""The Python door when it is closed, or left, while something runs: every caller is told, no thread stays."""

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from duetts.errors import Aborted, NotReady
from duetts.tts import TTS
from tests.waiting import LIMIT_S, wait_until

from .inputs import REF_TEXT, clip


def duetts_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("duetts")}


def slowed(tts: TTS) -> TTS:
    """Its steps take so long that 900 frames take 45 s: nothing ends by itself."""
    device = tts._synthesizer._speaker._engine._device  # type: ignore[attr-defined]
    launch = device.launch
    device.launch = lambda *rows: (time.sleep(0.05), launch(*rows))[1]
    return tts


def test_closing_ends_what_other_threads_wait_for(endless_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = duetts_threads()
    tts = slowed(TTS(endless_folder, device="cpu", cpu_threads=1))
    decode, decoding = tts._synthesizer._references.decode, threading.Event()

    async def slow(*arguments: Any) -> Any:
        decoding.set()
        await asyncio.sleep(0.5)
        return await decode(*arguments)

    monkeypatch.setattr(tts._synthesizer._references, "decode", slow)
    with ThreadPoolExecutor(2) as pool:
        speaking = pool.submit(tts.say, "On and on.", max_new_tokens=900, temperature=0)
        starting = pool.submit(tts.say, "Hi.", reference=clip("control_pcm16.wav"), reference_text=REF_TEXT)
        assert decoding.wait(LIMIT_S)
        tts.close()
        for waiting in (speaking, starting):
            with pytest.raises((Aborted, NotReady)):
                waiting.result(LIMIT_S)
    assert duetts_threads() <= before  # other tests' may end meanwhile


def test_a_closed_door_says_so(endless_folder: Path) -> None:
    with TTS(endless_folder, device="cpu", cpu_threads=1) as tts:
        stream = tts.stream("On and on.", max_new_tokens=900, temperature=0)
        next(stream)
    tts.close()
    with pytest.raises(NotReady):
        tts.say("Hi.")
    with pytest.raises(NotReady):
        next(stream)
    with pytest.raises(NotReady):
        next(tts.stream("Hi."))
    left_open = TTS(endless_folder, device="cpu", cpu_threads=1)
    stream = left_open.stream("On and on.", max_new_tokens=900, temperature=0)
    next(stream)
    left_open.close()
    stream.close()


def test_an_interrupt_ends_the_work(endless_folder: Path) -> None:
    with slowed(TTS(endless_folder, device="cpu", cpu_threads=1)) as tts:
        options = {"max_new_tokens": 900, "temperature": 0}
        for speak in (lambda: tts.say("On.", **options), lambda: list(tts.stream("On.", **options))):
            caller = threading.get_ident()

            def interrupt(caller: int = caller) -> None:
                wait_until(lambda: tts._synthesizer.stats()["running"])
                signal.pthread_kill(caller, signal.SIGINT)

            timer = threading.Thread(target=interrupt)
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                speak()
            timer.join()
            wait_until(lambda: tts._synthesizer.stats()["open"] == 0)
        assert tts._synthesizer.stats()["finished"] == {"aborted": 2}


@pytest.mark.parametrize("late", [False, True], ids=["before the work is handed over", "after"])
def test_an_interrupt_between_two_steps_ends_the_work(
    endless_folder: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    with slowed(TTS(endless_folder, device="cpu", cpu_threads=1)) as tts:
        hand_over = tts._loop.call_soon_threadsafe
        calls: list[Any] = []

        def interrupted(callback: Any, *arguments: Any) -> None:
            calls.append(callback)
            if len(calls) > 1:
                hand_over(callback, *arguments)
                return
            if late:
                hand_over(callback, *arguments)
                wait_until(lambda: tts._synthesizer.stats()["running"])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(tts._loop, "call_soon_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tts.say("On and on.", max_new_tokens=900, temperature=0)
        wait_until(lambda: tts._synthesizer.stats()["open"] == 0)
        assert len(calls) >= 2
        assert tts._synthesizer.stats()["finished"] == ({"aborted": 1} if late else {})
