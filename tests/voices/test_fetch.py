"""Clips by address: what is connected to, what never is, and the bounds on what comes. No name is looked up outside."""

import asyncio
import contextlib
import os
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetts.config import Limits, MediaConfig
from duetts.errors import ConfigError, ForbiddenReference, InvalidRequest, Overloaded, UnreachableReference
from duetts.types import Address, Float32, Int32
from duetts.voices import fetch
from duetts.voices.fetch import Fetcher, is_public
from duetts.voices.reference import ReferenceCodes

from ..inputs import clip
from ..internet import PUBLIC, Answering, Host, Internet, listening, redirecting, sending

CLIP = clip("control_pcm16.wav")
LARGEST = 1 << 20
LIMITS = Limits(reference_bytes=LARGEST)
URL = f"http://{PUBLIC}/anna.wav"


def fetcher(internet: Internet, limits: Limits = LIMITS, **media: Any) -> Fetcher:
    return Fetcher(MediaConfig(**media), limits, resolve=internet.resolve, transport=internet.transport)


async def fetched(fetcher: Fetcher, address: Address | str) -> bytes:
    address = Address(address) if isinstance(address, str) else address
    async with fetcher.fetched(address, "ref_audio") as audio:
        return audio


async def refusal(fetcher: Fetcher, address: Address | str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await fetched(fetcher, address)
    assert caught.value.field == "ref_audio"
    assert "ref_audio" in str(caught.value)
    return caught.value


async def single(answering: Answering, url: str = URL, **media: Any) -> bytes:
    """What a public host's answer comes to."""
    async with listening(answering) as host:
        return await fetched(fetcher(Internet(hosts={(PUBLIC, 80): host}), **media), url)


# -- which addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700::6810:84e5", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1",
        "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1",
        "239.255.255.250", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1",
        "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%1", "fec0::1", "ff02::1",
        "2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:10.0.0.1",
    ],
)  # fmt: skip
def test_other_addresses(address: str) -> None:
    assert not is_public(address)


async def test_a_public_host_is_asked_by_its_checked_address_and_told_its_name() -> None:
    async with listening(sending(CLIP)) as host:
        internet = Internet({"clips.example": [[PUBLIC]]}, {(PUBLIC, 8080): host})
        assert await fetched(fetcher(internet), "http://clips.example:8080/a%20b.wav?x=1#part") == CLIP
        assert internet.connected == [PUBLIC]
        assert host.asked[0].startswith("GET /a%20b.wav?x=1 HTTP/1.1\r\n")
        assert "\r\nHost: clips.example:8080\r\n" in host.asked[0]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "169.254.169.254", "10.1.2.3", "[::1]", "[::ffff:127.0.0.1]", "[fe80::1]", "inside.example", "LOCALHOST",
     "2130706433"],
)  # fmt: skip
async def test_what_is_not_public_is_not_connected_to(address: str) -> None:
    async with listening(sending(CLIP)) as host:
        everywhere = {(place, port): host for place in ("127.0.0.1", "::1", "10.1.2.3") for port in (80, host.port)}
        names = {"inside.example": [["10.1.2.3"]], "localhost": [["127.0.0.1"]], "2130706433": [["127.0.0.1"]]}
        internet = Internet(names, everywhere)
        for url in (f"http://{address}/x.wav", f"http://{address}:{host.port}/x.wav"):
            error = await refusal(fetcher(internet), url)
            assert isinstance(error, ForbiddenReference)
            assert error.code == "media_domain_forbidden"
        assert (host.connections, internet.connected) == (0, [])


async def test_the_same_without_a_test_between_it_and_the_network() -> None:
    async with listening(sending(CLIP)) as host:
        for name in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"):
            error = await refusal(Fetcher(MediaConfig(), LIMITS), f"http://{name}:{host.port}/x.wav")
            assert error.code == "media_domain_forbidden"
        assert host.connections == 0


async def test_one_address_that_is_not_public_is_enough_to_refuse_a_name() -> None:
    internet = Internet({"both.example": [[PUBLIC, "127.0.0.1"]]})
    assert (await refusal(fetcher(internet), "https://both.example/")).code == "media_domain_forbidden"
    assert not internet.connected


async def test_a_name_that_is_unknown_cannot_be_told_from_one_that_is_inside() -> None:
    internet = Internet({"inside.example": [["10.0.0.1"]]})
    errors = [await refusal(fetcher(internet), f"http://{name}.example/x.wav") for name in ("inside", "nothing")]
    assert len({str(error) for error in errors}) == len({error.code for error in errors}) == 1


async def test_a_name_that_changes_its_address_is_looked_up_once() -> None:
    async with listening(sending(CLIP)) as host, listening(sending(b"secret")) as inside:
        internet = Internet({"rebinding.example": [[PUBLIC], ["127.0.0.1"]]}, {(PUBLIC, 80): host, ("127.0.0.1", 80): inside})
        assert await fetched(fetcher(internet), "http://rebinding.example/x.wav") == CLIP
        assert (await refusal(fetcher(internet), "http://rebinding.example/x.wav")).code == "media_domain_forbidden"
        assert internet.look_ups == ["rebinding.example"] * 2
        assert inside.connections == 0


async def test_the_next_address_is_tried_when_one_is_dead() -> None:
    async with listening(sending(CLIP)) as host:
        internet = Internet({"two.example": [["8.8.4.4", PUBLIC]]}, {(PUBLIC, 80): host})
        assert await fetched(fetcher(internet), "http://two.example/x.wav") == CLIP
        assert internet.connected == ["8.8.4.4", PUBLIC]


async def test_addresses_of_this_machine_are_refused_although_they_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch.is_own("127.0.0.1")
    assert not fetch.is_own(PUBLIC)
    monkeypatch.setattr(fetch, "is_own", lambda address: address == PUBLIC)
    assert (await refusal(fetcher(Internet()), URL)).code == "media_domain_forbidden"


# -- redirects -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(status: int) -> None:
    async with listening(sending(CLIP)) as last, listening(redirecting("//clips.example/x", status)) as first:
        internet = Internet({"clips.example": [["8.8.8.8"]]}, {(PUBLIC, 80): first, ("8.8.8.8", 80): last})
        assert await fetched(fetcher(internet), URL) == CLIP
        assert "\r\nHost: clips.example\r\n" in last.asked[0]


@pytest.mark.parametrize("location", ["http://127.0.0.1/x", "//[::1]/x", "http://inside.example/x", "http://10.0.0.1/x"])
async def test_a_redirect_to_what_is_not_public_is_not_followed(location: str) -> None:
    async with listening(redirecting(location)) as first, listening(sending(b"secret")) as inside:
        internet = Internet({"inside.example": [["127.0.0.1"]]}, {(PUBLIC, 80): first})
        internet.hosts |= {(address, 80): inside for address in ("127.0.0.1", "::1", "10.0.0.1")}
        assert (await refusal(fetcher(internet), URL)).code == "media_domain_forbidden"
        assert (inside.connections, internet.connected) == (0, [PUBLIC])


@pytest.mark.parametrize("location", ["file:///etc/hostname", "ftp://h/x.wav", "data:audio/wav;base64,AAAA", "http://u:p@h/"])
async def test_a_redirect_to_another_kind_of_address_is_not_followed(location: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await single(redirecting(location))
    assert caught.value.code == "invalid_value"


async def test_redirects_have_an_end() -> None:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        number = int(head.split()[1].strip("/") or "0")
        await (sending(CLIP) if number == 0 else redirecting(f"/{number - 1}"))(head, writer)

    assert await single(answer, f"http://{PUBLIC}/3") == CLIP
    with pytest.raises(UnreachableReference, match="redirected more than 3 times"):
        await single(answer, f"http://{PUBLIC}/4")


# -- addresses that are no such ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///x.wav", "http://user@h.example/", "http://user:word@h.example/", "http://h.example:99999/", "http://[::1",
     "http://h.example/" + 2048 * "x", "http://a b/", "http://h.example/\ud800", "http://\ud800/"],
)  # fmt: skip
async def test_addresses_that_cannot_be_fetched(url: str) -> None:
    internet = Internet({"h.example": [[PUBLIC]]})
    assert (await refusal(fetcher(internet), url)).code in ("invalid_value", "media_domain_forbidden")
    assert not internet.connected


async def test_ports_of_other_protocols_are_left_alone() -> None:
    internet = Internet()
    assert (await refusal(fetcher(internet), f"http://{PUBLIC}:25/")).code == "media_domain_forbidden"
    assert not internet.look_ups


@given(st.text(alphabet=st.sampled_from("http://:@[]%?#ab.1-_~ \\\t\n\x00äß①。\ud800\u200d"), max_size=40), st.booleans())
def test_any_text_is_refused_in_order(text: str, redirected: bool) -> None:
    base = httpx.URL(URL) if redirected else None
    with contextlib.suppress(InvalidRequest):
        url = fetch._parsed(text, "ref_audio", base)
        assert url.scheme in ("http", "https")
        httpx.Request("GET", url.copy_with(host=PUBLIC), headers={"Host": url.netloc.decode("ascii")})


# -- domains that the operator names -------------------------------------------------------------------------------------


async def test_only_listed_domains_are_asked_and_they_may_be_inside() -> None:
    async with listening(sending(CLIP)) as host:
        names = {"clips.inside": [["127.0.0.1"]], "sub.clips.inside": [["127.0.0.1"]], "clips.example": [[PUBLIC]]}
        internet = Internet(names, {(PUBLIC, 80): host, ("127.0.0.1", 80): host, ("127.0.0.1", 25): host})
        mine = fetcher(internet, domains=("Clips.Inside",))
        for url in ("http://clips.inside/x.wav", "http://CLIPS.INSIDE./x.wav", "http://clips.inside:25/x.wav"):
            internet.names["clips.inside."] = [["127.0.0.1"]]
            assert await fetched(mine, url) == CLIP
        for url in (
            "http://clips.example/x",
            "http://sub.clips.inside/x",
            "http://127.0.0.1/x",
            "http://clips.inside.example/x",
        ):
            assert (await refusal(mine, url)).code == "media_domain_forbidden"
        assert host.connections == 3


async def test_the_operator_may_list_none() -> None:
    mine = fetcher(internet := Internet({"none": [[PUBLIC]]}), domains=("none",))
    for host in ("none", PUBLIC, "127.0.0.1"):
        assert (await refusal(mine, f"http://{host}/x")).code == "media_domain_forbidden"
    assert not internet.look_ups


async def test_a_listed_domain_cannot_redirect_to_another_one() -> None:
    async with listening(redirecting("http://127.0.0.1/x")) as host, listening(sending(b"secret")) as inside:
        internet = Internet({"clips.example": [[PUBLIC]]}, {(PUBLIC, 80): host, ("127.0.0.1", 80): inside})
        mine = fetcher(internet, domains=("clips.example",))
        assert (await refusal(mine, "http://clips.example/x")).code == "media_domain_forbidden"
        assert inside.connections == 0


@pytest.mark.parametrize("domain", ["", "http://h.example", "h.example:80", "*.example", "h.example/x", "ä.example"])
def test_what_is_no_domain(domain: str) -> None:
    with pytest.raises(ConfigError, match="domains"):
        MediaConfig(domains=(domain,))


# -- what comes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "media_type",
    ["audio/mpeg", "AUDIO/WAV; codecs=1", "video/mp4", "video/webm", "application/octet-stream", "binary/octet-stream",
     "application/ogg"],
)  # fmt: skip
async def test_media_types_that_are_taken(media_type: str) -> None:
    assert await single(sending(CLIP, content_type=media_type)) == CLIP


@pytest.mark.parametrize(
    "headers", [{"content_type": "text/html"}, {"content_type": "video/x-msvideo"}, {"content_encoding": "gzip"}]
)
async def test_media_types_that_are_not(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await single(sending(CLIP, **headers))
    assert caught.value.code == "reference_undecodable"


@pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500])
async def test_other_statuses(status: int) -> None:
    with pytest.raises(UnreachableReference) as caught:
        await single(sending(b"", status))
    assert caught.value.code == "reference_fetch_failed"


async def test_a_stated_length_is_believed_before_anything_is_read() -> None:
    with pytest.raises(InvalidRequest, match=str(LARGEST)) as caught:
        await single(sending(b"x", content_length=str(LARGEST + 1)))
    assert caught.value.code == "reference_too_large"


async def test_an_endless_body_is_left() -> None:
    sent = 0

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    with pytest.raises(InvalidRequest) as caught:
        await single(answer)
    assert caught.value.code == "reference_too_large"
    assert sent < 32 * LARGEST  # what buffers on the way hold


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: 9\r\n\r\n"])
async def test_a_slow_host_is_left(head: bytes) -> None:
    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            await asyncio.sleep(0.02)
            writer.write(head and b"x" * 0)

    with pytest.raises(UnreachableReference, match=r"within 0\.2 s"):
        await single(answer, fetch_s=0.2)


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
                                    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000])  # fmt: skip
async def test_a_broken_answer(answer: bytes) -> None:
    async def talk(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    with pytest.raises(UnreachableReference):
        await single(talk)


async def test_a_host_that_is_not_there() -> None:
    error = await refusal(fetcher(Internet()), URL)
    assert error.code == "reference_fetch_failed"


async def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(sending(b"proxied")) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
        assert await single(sending(CLIP)) == CLIP
        assert proxy.connections == 0


async def test_cookies_are_not_carried_on() -> None:
    async with listening(sending(CLIP)) as last:
        first_answer = sending(b"", 302, location="http://8.8.8.8/x", set_cookie="secret=1; Path=/")
        async with listening(first_answer) as first:
            internet = Internet({}, {(PUBLIC, 80): first, ("8.8.8.8", 80): last})
            for _ in range(2):
                assert await fetched(fetcher(internet), URL) == CLIP
        assert "secret" not in "".join((*first.asked, *last.asked))


async def test_few_are_fetched_at_once_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "AT_ONCE", 2)
    going, most, release = 0, 0, asyncio.Event()

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal going, most
        going += 1
        most = max(most, going)
        await release.wait()
        await sending(CLIP)(head, writer)
        going -= 1

    async with listening(answer) as host:
        mine = fetcher(Internet(hosts={(PUBLIC, 80): host}), Limits(reference_queue=1))
        tasks = [asyncio.ensure_future(fetched(mine, URL)) for _ in range(4)]
        refused = next(iter((await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]))
        assert isinstance(refused.exception(), Overloaded)
        while going < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        release.set()
        done = [task for task in tasks if task is not refused]
        assert await asyncio.gather(*done) == [CLIP] * 3
        assert most == 2


# -- TLS -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=clips.example", "-addext", "subjectAltName=DNS:clips.example", "-keyout", str(key),
         "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


@pytest.fixture
async def secure(certificate: tuple[Path, Path]) -> AsyncIterator[tuple[Host, ssl.SSLContext]]:
    """A host that speaks TLS as clips.example, and a context that trusts it."""
    key, chain = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    async with listening(sending(CLIP), context) as host:
        yield host, ssl.create_default_context(cafile=str(chain))


@pytest.mark.parametrize(("name", "good"), [("clips.example", True), ("other.example", False)])
async def test_a_certificate_must_be_for_the_name(name: str, good: bool, secure: tuple[Host, ssl.SSLContext]) -> None:
    """Although it is an address that is connected to; without anything between the fetcher and the network."""
    host, trusting = secure
    internet = Internet({name: [["127.0.0.1"]]})
    mine = Fetcher(MediaConfig(domains=(name,)), LIMITS, resolve=internet.resolve, tls=trusting)
    if good:
        assert await fetched(mine, f"https://{name}:{host.port}/x.wav") == CLIP
    else:
        assert (await refusal(mine, f"https://{name}:{host.port}/x.wav")).code == "reference_fetch_failed"
        assert not host.asked


async def test_a_certificate_must_be_trusted(secure: tuple[Host, ssl.SSLContext]) -> None:
    internet = Internet({"clips.example": [["127.0.0.1"]]})
    mine = Fetcher(MediaConfig(domains=("clips.example",)), LIMITS, resolve=internet.resolve)
    assert (await refusal(mine, f"https://clips.example:{secure[0].port}/x.wav")).code == "reference_fetch_failed"


# -- files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "deep").mkdir(parents=True)
    (folder / "anna.wav").write_bytes(CLIP)
    (folder / "deep" / "link.wav").symlink_to(folder / "anna.wav")
    (folder / "inner").symlink_to("deep")
    (tmp_path / "secret.wav").write_bytes(CLIP)
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "secret.wav").write_bytes(CLIP)
    (folder / "out.wav").symlink_to(tmp_path / "secret.wav")
    (folder / "out").symlink_to(tmp_path)
    (folder / "gone.wav").symlink_to(tmp_path / "missing.wav")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe.wav")
    return folder


def open_files() -> set[str]:
    """The numbers of those that this process has. Some may be closed by other tests' servers meanwhile."""
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("path", ["anna.wav", "./anna.wav", "deep/link.wav", "inner/link.wav", "{}/anna.wav"])
async def test_files_of_the_folder(folder: Path, path: str) -> None:
    mine = fetcher(Internet(), folder=folder)
    assert await fetched(mine, Address(path.format(folder), local=True)) == CLIP


async def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(folder)
    mine = fetcher(Internet(), folder=tmp_path / "short")
    for path in (tmp_path / "short" / "anna.wav", folder / "anna.wav"):
        assert await fetched(mine, Address(str(path), local=True)) == CLIP


async def test_nothing_else_and_no_word_of_what_exists(folder: Path, tmp_path: Path) -> None:
    inside = ["missing.wav", "out.wav", "out/secret.wav", "out/missing.wav", "gone.wav", "loop", "loop/x", "pipe.wav", "deep",
              "", ".", "anna.wav/x", "deep/../anna.wav", "a\0b", "x" * 300]  # fmt: skip
    outside = [f"{folder}/../secret.wav", f"{tmp_path}/secret.wav", f"{tmp_path}/missing.wav", f"{tmp_path}/media2/secret.wav",
               "../secret.wav", "/etc/hostname", "//etc/hostname", "~/x.wav", "/dev/zero", "/proc/self/environ"]  # fmt: skip
    mine, none = fetcher(Internet(), folder=folder), fetcher(Internet())
    for where in (mine, none):
        await refusal(where, Address("pipe.wav", local=True))
        before = open_files()
        errors = [await refusal(where, Address(path, local=True)) for path in (*inside, *outside)]
        assert {(type(error), error.code) for error in errors} == {(ForbiddenReference, "local_media_forbidden")}
        assert len({str(error) for error in errors}) == 1
        assert open_files() <= before


async def test_a_file_has_the_bound_of_all_clips(folder: Path) -> None:
    error = await refusal(fetcher(Internet(), Limits(reference_bytes=1024), folder=folder), Address("anna.wav", local=True))
    assert error.code == "reference_too_large"
    assert "1024" in str(error)


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed_local_media_path"):
        fetcher(Internet(), folder=tmp_path / "nothing")


# -- codes ---------------------------------------------------------------------------------------------------------------


async def test_requests_for_one_address_share_its_fetching_and_a_known_file_is_not_encoded_again() -> None:
    encoded = 0

    async def encode(wave: Float32) -> Int32:
        nonlocal encoded
        encoded += 1
        return (wave[:40].reshape(10, 4) * 1000).astype("int32")

    async with listening(sending(CLIP)) as host:
        codes = ReferenceCodes(encode, 44100, Limits(), fetcher=fetcher(Internet(hosts={(PUBLIC, 80): host})))
        clips = await asyncio.gather(*(codes.decode(Address(URL), "ref_audio") for _ in range(5)))
        assert host.connections == codes.num_decoded == 1
        await asyncio.gather(*(codes.codes(clip) for clip in clips))
        later = await codes.decode(Address(URL), "ref_audio")
        same = await codes.decode(CLIP, "ref_audio")
        assert host.connections == 2
        assert encoded == codes.num_decoded == 1
        assert (await codes.codes(later)).hit
        assert (await codes.codes(same)).hit
        codes.close()
