"""HTTP to a server that may be down, slow, busy or broken: an answer in JSON, or one sentence that says what is wrong.

A server that says that it is busy is waited for, as it asks; all threads wait together, so that it gets no more
requests meanwhile. A connection that closes in the middle of an answer is tried again a few times.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Protocol

from truedraft.errors import OptionError, PeerError

if TYPE_CHECKING:
    import httpx2

_QUOTED = 200
"""Characters of a server's own words that are shown."""
_BUSY = {429: "too many requests", 503: "unavailable"}


class Clock(Protocol):
    """Where time comes from; tests bring their own."""

    def monotonic(self) -> float:
        """Seconds since some moment."""
        ...

    def time(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server that cannot answer now is waited for.

    Attributes:
        total_s: that one request waits in all.
        first_s: of the first wait, where the server does not say how long; each further one is twice as long.
        longest_s: of such a wait.
        retries: of a request whose connection closes before its answer is whole.
        clock: by which it is waited.
        jitter: a number in [0, 1), by which requests of many clients do not come back together.
    """

    total_s: float = 600.0
    first_s: float = 1.0
    longest_s: float = 60.0
    retries: int = 3
    clock: Clock = time
    jitter: Callable[[], float] = field(default=random.random)

    def wait_s(self, attempt: int) -> float:
        """Of the wait behind so many failed attempts: the upper half of a doubling time, drawn."""
        longest = min(self.first_s * 2.0 ** min(attempt, 32), self.longest_s)
        return longest * (0.5 + 0.5 * self.jitter())


class Caller:
    """Sends JSON to one server; threads may share it.

    Args:
        url: of the server, with or without /v1.
        api_key: that it is asked with; None sends none.
        timeout_s: that one answer may take.
        patience: with a server that is busy.
        tell: is called with a sentence, once, when the server makes us wait.
        transport: that carries requests in place of the network.

    Attributes:
        url: without /v1, and without the name and password that it may hold, for messages.

    Raises:
        OptionError: the address or the key cannot be used.
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
    ) -> None:
        import httpx2

        self._root = _root(url)
        self.url = str(self._root.copy_with(username=None, password=None)).rstrip("/")
        self._has_key = api_key is not None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key):
            raise OptionError(
                "holds what no HTTP header can: a key is printable ASCII without spaces around it", field="api_key"
            )
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._patience = patience or Patience()
        self._clock = self._patience.clock
        self._tell = tell
        self._guard = threading.Lock()
        self._free_at = -float("inf")  # when the server may be asked again
        self._told = False
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        here = self._root.host in ("localhost", "127.0.0.1", "::1")  # no proxy leads there
        self._client = httpx2.Client(
            headers=headers, timeout=timeout_s, limits=limits, transport=transport, trust_env=not here
        )

    def get(self, path: str) -> Mapping[str, Any]:
        """The JSON at a path.

        Raises:
            PeerError: there is none; says why.
        """
        return self._called("GET", path, None, threading.Event())

    def post(self, path: str, body: Mapping[str, Any], over: threading.Event | None = None) -> Mapping[str, Any]:
        """The JSON that answers some.

        Args:
            path: on the server.
            body: that is sent.
            over: once it is set nobody wants the answer, and no further attempt is made.

        Raises:
            PeerError: there is none; says why.
        """
        return self._called("POST", path, body, over or threading.Event())

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _called(
        self, method: str, path: str, body: Mapping[str, Any] | None, over: threading.Event
    ) -> Mapping[str, Any]:
        waited, attempt, closed = 0.0, 0, 0
        while True:
            waited += self._until_free(over)
            found = self._once(method, path, body)
            if isinstance(found, _Closed):
                closed += 1
                if closed > self._patience.retries:
                    raise PeerError(
                        f"{self.url} closed the connection in the middle of an answer {closed} times; see its log"
                    )
                self._clock.sleep(self._patience.wait_s(closed - 1))
                continue
            if found.status not in _BUSY:
                return self._json(found, path)
            asked = found.retry_after_s(self._clock.time())
            at_once = asked == 0.0 and attempt >= self._patience.retries  # which it said often enough
            wait_s = self._patience.wait_s(attempt) if asked is None or at_once else asked
            attempt += 1
            if waited + wait_s > self._patience.total_s:
                raise PeerError(
                    f"{self.url} is busy ({found.status} {_BUSY[found.status]}) and would be waited for "
                    f"{waited + wait_s:.0f} s, of at most {self._patience.total_s:.0f} s; ask it later, or less at once"
                )
            self._hold(wait_s, found.status)

    def _hold(self, wait_s: float, status: int) -> None:
        """All requests wait."""
        with self._guard:
            self._free_at = max(self._free_at, self._clock.monotonic() + wait_s)
            told, self._told = self._told, True
        if not told:
            self._tell(f"{self.url} is busy ({status} {_BUSY[status]}); it is asked again when it says so")

    def _until_free(self, over: threading.Event) -> float:
        """Wait until the server may be asked; returns the seconds that took."""
        began = now = self._clock.monotonic()
        while now < self._free_at and not over.is_set():
            self._clock.sleep(self._free_at - now)
            now = self._clock.monotonic()
        if over.is_set():
            raise PeerError("it was not asked: the run was broken off")
        return now - began

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> _Answer | _Closed:
        import httpx2

        url = self._root.copy_with(path=self._root.path.rstrip("/") + path)
        end = self._clock.monotonic() + self._timeout_s
        try:
            with self._client.stream(method, url, json=body) as response:
                parts = []
                for part in response.iter_bytes():  # a server may send a byte now and then, for ever
                    parts.append(part)
                    if self._clock.monotonic() > end:
                        raise self._too_slow()
                return _Answer(response.status_code, response.headers, b"".join(parts))
        except httpx2.TimeoutException as error:
            raise self._too_slow() from error
        except httpx2.ConnectError as error:
            raise PeerError(
                f"nothing answers at {self.url} ({_gist(error)}); start the server, or correct the address"
            ) from error
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError):
            return _Closed()
        except (httpx2.HTTPError, UnicodeEncodeError) as error:
            raise PeerError(f"{self.url} cannot be asked ({_gist(error)})") from error

    def _too_slow(self) -> PeerError:
        return PeerError(
            f"{self.url} did not answer within {self._timeout_s:g} s; give it more time, or ask for fewer tokens"
        )

    def _json(self, found: _Answer, path: str) -> Mapping[str, Any]:
        said = f" ({found.said})" if found.said else ""
        if found.status in (401, 403):
            key = "the key was refused" if self._has_key else "it wants a key, and none was given"
            words = f"{self.url}: {key}: {found.status}{said}; give one by --api-key-env NAME"
        elif found.status == 404:
            words = f"{self.url} has no {path}, or not this model: 404{said}"
        elif 300 <= found.status < 400:
            words = f"{self.url} sends us on to {found.headers.get('location', 'nowhere')!r}; give that address"
        elif not 200 <= found.status < 300:
            words = f"{self.url} answered {found.status}{said}"
        elif found.is_error:
            words = f"{self.url} answered an error{said}"
        elif not isinstance(found.content, Mapping):
            kind = found.headers.get("content-type", "no type")
            words = f"{self.url}{path} answered no JSON object but {kind}{said}; is this the address of an API?"
        else:
            return found.content
        raise PeerError(words, status=found.status)


class _Closed:
    """The connection closed before the answer was whole."""


class _Answer:
    """What came.

    Args:
        status: by HTTP.
        headers: of it.
        body: as bytes.

    Attributes:
        content: of JSON; None where it is none.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body
        try:
            self.content = json.loads(body)
        except (ValueError, RecursionError):
            self.content = None

    @property
    def is_error(self) -> bool:
        """Whether it is the form of an error, whatever its status says."""
        return isinstance(self.content, Mapping) and bool(self.content.get("error"))

    @property
    def said(self) -> str:
        """The message of an error, or the beginning of what is no JSON; quoted, and cut."""
        content = self.content
        if content is None:
            words: Any = self._body.decode(errors="replace")
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
        """Seconds that the server wants to be left alone, of a number or a date; None where it does not say."""
        said = self.headers.get("retry-after", "").strip()
        if said.isdecimal():
            return float(said)
        try:
            return max(parsedate_to_datetime(said).timestamp() - now, 0.0)
        except ValueError:
            return None


def _root(url: str) -> httpx2.URL:
    """The address without /v1.

    Raises:
        OptionError: it is none.
    """
    import httpx2

    try:
        found = httpx2.URL(url.strip())
        if found.scheme not in ("http", "https") or not found.host:
            raise httpx2.InvalidURL("no host")
    except httpx2.InvalidURL as error:
        raise OptionError(f"{url!r} is no address; give one such as http://127.0.0.1:8000") from error
    path = found.path.rstrip("/").removesuffix("/v1")
    return found.copy_with(path=path or "/", query=None, fragment=None)


def _gist(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0].strip().rstrip(".") if lines else "") or type(error).__name__
