"""HTTP to a server that may be down, slow, busy or broken: returns JSON, or raises an error with one clear sentence.

A busy server is retried after the time that it names, by all threads together. Answers are limited in bytes and, except
for event streams, in time.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from truedraft.errors import OptionError, PeerError, first_line

if TYPE_CHECKING:
    import httpx2

_QUOTED = 200  # characters of a server's message that are shown
_MOST_BYTES, _MOST_EVENT_BYTES = 128 << 20, 16 << 20  # limits of an answer, and of one event of a stream
_CONNECTING_S = 20.0
_LAST_PORT = 65_535
_FIELDS = (b"", b"event", b"id", b"retry")
"""Names of fields in an event stream other than data, before the colon; comments have an empty name."""
_BUSY = {429: "too many requests", 503: "unavailable"}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a busy server."""

    total_s: float = 600.0
    first_s: float = 1.0  # the first wait, where the server names none; each further one is twice as long
    longest_s: float = 60.0
    retries: int = 3  # of a request with a connection that closes before its answer is complete
    clock: Any = time  # has `monotonic`, `time` and `sleep`; tests replace it
    jitter: Callable[[], float] = field(default=random.random)  # returns a number in [0, 1)

    def wait_s(self, attempt: int) -> float:
        longest = min(self.first_s * 2.0 ** min(attempt, 32), self.longest_s)
        return longest * (0.5 + 0.5 * self.jitter())


class Caller:
    """Sends JSON requests to one server; safe to share between threads.

    `tell` is called once with a sentence when the server is busy; `key_from` says in messages where a key is
    configured. With `follows` redirects are followed, but the key is not sent to another host, nor to http after https.
    Raises OptionError if the address or the key cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        patience: Patience | None = None,
        tell: Callable[[str], None] = lambda _: None,
        transport: httpx2.BaseTransport | None = None,
        follows: bool = False,
        key_from: str = "--api-key-env NAME",
    ) -> None:
        import httpx2

        self._root = _root(url)  # without /v1
        self.url = str(self._root.copy_with(username=None, password=None)).rstrip("/")
        self._has_key = api_key is not None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key):
            raise OptionError(
                "holds what no HTTP header can: a key is printable ASCII without spaces around it", field="api_key"
            )
        self._timeout_s = timeout_s
        self._key_from = key_from
        self._patience = patience or Patience()
        self._clock = self._patience.clock
        self._notify = tell
        self._guard = threading.Lock()
        self._free_at = -float("inf")  # when the next request may be sent
        self._notified = False
        self._client = httpx2.Client(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, _CONNECTING_S)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
            trust_env=self._root.host not in ("localhost", "127.0.0.1", "::1"),  # where proxies do not apply
            follow_redirects=follows,
        )

    def get(self, path: str) -> Mapping[str, Any]:
        """The JSON at a path; PeerError says why there is none."""
        return self._json(self._answered("GET", path), path)

    def text(self, path: str) -> str:
        """The text at a path; PeerError says why there is none."""
        found = self._answered("GET", path)
        if not 200 <= found.status < 300:
            self._json(found, path)  # raises the error
        return found.body.decode(errors="replace")

    def post(self, path: str, body: Mapping[str, Any], over: threading.Event | None = None) -> Mapping[str, Any]:
        """Send JSON and return the JSON of the answer, or raise PeerError; setting `over` cancels further attempts."""
        return self._json(self._answered("POST", path, body, over), path)

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        """Send JSON and yield the JSON of each event of the answer's stream; PeerError if it ends before [DONE]."""
        try:
            with self._opened("POST", path, body) as response:
                if not 200 <= response.status_code < 300:
                    end = self._clock.monotonic() + self._timeout_s
                    self._json(self._whole(response, end), path)
                for data in self._event_data(response, path):
                    if data.strip() == b"[DONE]":
                        return
                    found = _Answer(response.status_code, response.headers, data)
                    if found.is_error:
                        raise PeerError(f"{self.url} answered an error ({found.said})")
                    if not isinstance(found.content, Mapping):
                        raise PeerError(f"{self.url}{path} sent an event that is no JSON object ({found.said})")
                    yield found.content
        except _ClosedError:
            pass
        raise PeerError(f"{self.url} ended its answer in the middle; ask again, and see its log")

    def _event_data(self, response: httpx2.Response, path: str) -> Iterator[bytes]:
        data: list[bytes] = []
        size = 0
        for line in _lines(self._parts(response)):
            name, _, value = line.partition(b":")
            size = size + len(value) if line else 0
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif name not in _FIELDS:
                answer = _Answer(response.status_code, response.headers, line)
                said = answer.said or repr(line[:_QUOTED].decode(errors="replace"))
                wrong = f"no stream of events but {answer.kind} ({said})"
                raise PeerError(f"{self.url}{path} answered {wrong}; is this the address of an API?")
            if data and (not line or data == [b"[DONE]"]):
                yield b"\n".join(data)
                data = []
            if size > _MOST_EVENT_BYTES:
                raise self._too_long(_MOST_EVENT_BYTES)

    def close(self) -> None:
        self._client.close()

    def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, over: threading.Event | None = None
    ) -> _Answer:
        waited, attempt, closed = 0.0, 0, 0
        while True:
            waited += self._until_free(over)
            end = self._clock.monotonic() + self._timeout_s
            try:
                with self._opened(method, path, body) as response:
                    found = self._whole(response, end)
            except _ClosedError:
                closed += 1
                if closed > self._patience.retries:
                    how = f"closed the connection in the middle of an answer {closed} times"
                    raise PeerError(f"{self.url} {how}; see its log") from None
                self._clock.sleep(self._patience.wait_s(closed - 1))
                continue
            if found.status not in _BUSY:
                return found
            retry_s = found.retry_after_s(self._clock.time())
            at_once = retry_s == 0.0 and attempt >= self._patience.retries  # after repeated zero waits, the usual ones
            wait_s = self._patience.wait_s(attempt) if retry_s is None or at_once else retry_s
            attempt += 1
            busy = f"{found.status} {_BUSY[found.status]}"
            if waited + wait_s > self._patience.total_s:
                raise PeerError(
                    f"{self.url} is busy ({busy}) and would be waited for {waited + wait_s:.0f} s, of at most "
                    f"{self._patience.total_s:.0f} s; try later, or send fewer"
                )
            with self._guard:
                self._free_at = max(self._free_at, self._clock.monotonic() + wait_s)
                notified, self._notified = self._notified, True
            if not notified:
                self._notify(f"{self.url} is busy ({busy}); it is asked again when it says so")

    def _until_free(self, over: threading.Event | None) -> float:
        began = now = self._clock.monotonic()
        while now < self._free_at and not (over and over.is_set()):
            self._clock.sleep(self._free_at - now)
            now = self._clock.monotonic()
        if over and over.is_set():
            raise PeerError("no request was sent: the run was interrupted")
        return now - began

    @contextlib.contextmanager
    def _opened(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[httpx2.Response]:
        import httpx2

        url = self._root.copy_with(path=self._root.path.rstrip("/") + path)
        try:
            with self._client.stream(method, url, json=body) as response:
                redirected = response.request.method != method  # so this is no answer to it
                yield response.history[-1] if redirected else response
        except (httpx2.ConnectTimeout, httpx2.ConnectError) as error:
            target = error.request.url
            at = self.url if target.netloc == self._root.netloc else f"{target.scheme}://{target.netloc.decode()}"
            raise PeerError(
                f"nothing answers at {at} ({first_line(error)}); start the server, or correct the address"
            ) from error
        except httpx2.TimeoutException as error:
            raise self._too_slow() from error
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError):
            raise _ClosedError from None
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:  # Unicode: long host names
            raise PeerError(f"{self.url} cannot be asked ({first_line(error)})") from error

    def _whole(self, response: httpx2.Response, end: float) -> _Answer:
        parts = []
        for part in self._parts(response):  # a server may send single bytes forever
            parts.append(part)
            if self._clock.monotonic() > end:
                raise self._too_slow()
        return _Answer(response.status_code, response.headers, b"".join(parts))

    def _parts(self, response: httpx2.Response) -> Iterator[bytes]:
        size = 0
        for part in response.iter_bytes():
            size += len(part)
            if size > _MOST_BYTES:
                raise self._too_long(_MOST_BYTES)
            yield part

    def _too_long(self, most: int) -> PeerError:
        return PeerError(f"{self.url} answers more than {most >> 20} MiB at once; is this the address of an API?")

    def _too_slow(self) -> PeerError:
        return PeerError(
            f"{self.url} did not answer within {self._timeout_s:g} s; give it more time, or request fewer tokens"
        )

    def _json(self, found: _Answer, path: str) -> Mapping[str, Any]:
        said = f" ({found.said})" if found.said else ""
        if found.status in (401, 403):
            key = "the key was refused" if self._has_key else "it wants a key, and none was given"
            words = f"{self.url}: {key}: {found.status}{said}; give one by {self._key_from}"
        elif found.status == 404:
            words = f"{self.url} has no {path}, or not this model: 404{said}"
        elif 300 <= found.status < 400:
            words = f"{self.url} sends us on to {found.headers.get('location', 'nowhere')!r}; give that address"
        elif not 200 <= found.status < 300:
            words = f"{self.url} answered {found.status}{said}"
        elif found.is_error:
            words = f"{self.url} answered an error{said}"
        elif not isinstance(found.content, Mapping):
            words = f"{self.url}{path} answered no JSON object but {found.kind}{said}; is this the address of an API?"
        else:
            return found.content
        raise PeerError(words, status=found.status)


class _ClosedError(Exception): ...


class _Answer:
    """An HTTP answer; `content` is None if the body is not JSON."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        try:
            self.content = json.loads(body)
        except (ValueError, RecursionError):
            self.content = None

    @property
    def kind(self) -> str:
        return self.headers.get("content-type", "no type")

    @property
    def is_error(self) -> bool:
        return isinstance(self.content, Mapping) and bool(self.content.get("error"))

    @property
    def said(self) -> str:
        content = self.content
        if content is None:
            words: Any = self.body.decode(errors="replace")
        elif self.is_error:
            words = content["error"]
            words = words.get("message", words) if isinstance(words, Mapping) else words
        elif isinstance(content, Mapping):
            words = content.get("message") or content.get("detail") or ""
        else:
            words = content
        text = " ".join((words if isinstance(words, str) else json.dumps(words)).split())
        cut = text if len(text) <= _QUOTED else text[: _QUOTED - 3] + "..."
        return repr(cut) if cut else ""

    def retry_after_s(self, now: float) -> float | None:
        """Seconds of the Retry-After header, a number or a date; None without one."""
        said = self.headers.get("retry-after", "").strip()
        if said.isdecimal():
            return float(said)
        try:
            return max(parsedate_to_datetime(said).timestamp() - now, 0.0)
        except ValueError:
            return None


def _root(url: str) -> httpx2.URL:
    import httpx2

    try:
        found = httpx2.URL(url.strip())
        if found.scheme not in ("http", "https") or not found.host or (found.port or 0) > _LAST_PORT:
            raise httpx2.InvalidURL("no host, or no port")
    except httpx2.InvalidURL as error:
        raise OptionError(f"{url!r} is no address; give one such as http://127.0.0.1:8000") from error
    path = found.path.rstrip("/").removesuffix("/v1")
    return found.copy_with(path=path or "/", query=None, fragment=None)


def _lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    left = b""
    for part in parts:
        *lines, left = (left + part).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(left) > _MOST_EVENT_BYTES:
            break
    yield left
