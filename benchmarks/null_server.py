"""A server that answers every speech request at once with silence, in chunks of 16 frames: the limit of a client.

    python benchmarks/null_server.py [--port 8001] [--chunk 16]

It reads no more of a request than its length and `max_new_tokens`. `duetts bench T --url http://127.0.0.1:8001` then tells
what the client alone can carry; `duetts serve --engine null` is the same with the real server in between.
"""

import argparse
import asyncio
import re

FRAME_BYTES = 2 * 2048


class Answering(asyncio.Protocol):
    """One connection, one request."""

    def __init__(self, chunk: int) -> None:
        self._chunk, self._heard = chunk, bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._may_write = asyncio.Event()
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head = self._heard.find(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", self._heard[: max(0, head)])
        if head >= 0 and length is None:  # somebody asks what this is
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self._transport.close()
        if head < 0 or length is None or len(self._heard) < head + 4 + int(length[1]):
            return
        frames = re.search(rb'"max_new_tokens": *(\d+)', self._heard)
        self._task = asyncio.ensure_future(self._answer(int(frames[1]) if frames else 100))

    async def _answer(self, frames: int) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\nTransfer-Encoding: chunked\r\n\r\n")
        while frames and not self._transport.is_closing():
            size = min(frames, self._chunk)
            frames -= size
            self._transport.write(b"%x\r\n%b\r\n" % (FRAME_BYTES * size, bytes(FRAME_BYTES * size)))
            await self._may_write.wait()
        self._transport.write(b"0\r\n\r\n")
        self._transport.close()


async def serve(port: int, chunk: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answering(chunk), "127.0.0.1", port, backlog=2048)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--port", type=int, default=8001)
    arguments.add_argument("--chunk", type=int, default=16)
    given = arguments.parse_args()
    try:
        import uvloop

        uvloop.run(serve(given.port, given.chunk))
    except ImportError:
        asyncio.run(serve(given.port, given.chunk))


if __name__ == "__main__":
    main()
