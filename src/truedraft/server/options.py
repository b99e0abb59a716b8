"""Options of the server. Needs no web framework."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, fields
from pathlib import Path

from truedraft.errors import OptionError
from truedraft.options import flag, option

_LAST_PORT = 65_535


@dataclass(frozen=True)
class ServerOptions:
    """Address, access and limits of a server."""

    host: str = option("127.0.0.1", "The address to listen on; 0.0.0.0 listens on all.", "HOST")
    port: int = option(8000, "The port to listen on; 0 takes a free one.", "PORT", least=0)
    api_key_file: Path | None = option(
        None, "Let in only clients with a key of this file, one NAME KEY a line; KEY may be sha256:HEX.", "FILE"
    )
    served_model_name: tuple[str, ...] = option(
        (), "What clients call the model; may be repeated, and the first is what answers say.", "NAME"
    )
    chat_template: Path | None = option(None, "A chat template (Jinja) in place of the model's own.", "FILE")
    trust_control_tokens: bool = flag(
        "Read control tokens that messages spell, as <|im_end|>, as the tokens; otherwise they stay text."
    )
    allow_rule: tuple[str, ...] = option((), "A further rule that a request may select; may be repeated.", "R")
    max_batch: int = option(32, "Most requests that are answered together.", "N", least=1)
    max_queue: int = option(256, "Most requests that wait; further ones are refused with status 429.", "N", least=0)
    max_per_client: int | None = option(
        None, "Most requests that one API key has open.", "N", least=1, shown_default="no limit"
    )
    max_samples: int = option(16, "Most answers to one request (n, best_of, prompts).", "N", least=1)
    max_new_tokens: int = option(4096, "Most new tokens of an answer, even if its request allows more.", "N", least=1)
    max_body_bytes: str = option("8M", "Most bytes of a request's body.", "SIZE")
    max_connections: int | None = option(
        None, "Most open connections; further ones take the place of those without a request.", "N", least=1,
        shown_default="what the limit of open files leaves",
    )  # fmt: skip
    head_timeout_s: float = option(10.0, "Close a connection that has sent no request's head after so long.", "S")
    body_timeout_s: float = option(60.0, "Refuse a request whose body has not come after so many seconds.", "S")
    prefix_cache_bytes: str = option(
        "512M", "Keep so many bytes of keys and values for requests that begin like earlier ones; 0 keeps none.", "SIZE"
    )
    share_prefixes: bool = flag("Let clients with different API keys share what their requests begin with.")
    request_timeout_s: float | None = option(None, "End a request after so many seconds.", "S", shown_default="never")
    hung_after_s: float = option(300.0, "Say at /health that the engine hangs after a step of so many seconds.", "S")
    drain_s: float = option(30.0, "When stopped, continue open requests for so many seconds.", "S")
    tls_certificate: Path | None = option(None, "Serve https with this certificate.", "FILE")
    tls_key: Path | None = option(None, "The certificate's private key.", "FILE")
    allowed_host: tuple[str, ...] = option(
        (),
        "Answer requests to this host name; may be repeated, * is any. On loopback its own names are answered, too, "
        "and no others; elsewhere all are where none is given.",
        "NAME",
    )
    cors_origin: tuple[str, ...] = option((), "Pages from this origin may send requests; may be repeated.", "ORIGIN")
    price_per_hour: float | None = option(
        None, "What this machine costs an hour, for the estimated cost of a million tokens in /metrics.", "PRICE"
    )
    otlp_endpoint: str | None = option(
        None, "Send a trace of every answer to this OpenTelemetry collector, as http://127.0.0.1:4318/v1/traces.", "URL"
    )
    no_playground: bool = flag("No page at /.")


@dataclass(frozen=True)
class LearningOptions:
    """Online learning of drafters from the answers."""

    learn: bool = flag(
        "Train heads and draft models on what is answered, in the background, and take what is shown to be better."
    )
    learn_folder: Path | None = option(
        None, "Write what was learned here, and go on with the last of it; no text is written.", "DIR",
        shown_default="nothing is written",
    )  # fmt: skip
    learn_share: float = option(0.05, "Learn for this share of the time at most, and never at capacity.", "X")
    learn_keep_s: float = option(86400.0, "Forget an answer after so many seconds; it is only in memory.", "S")
    learn_per_tenant: bool = flag("Learn for each API key only from its own answers.")


@dataclass(frozen=True)
class ReplicaOptions:
    """The number of replicas."""

    ray: bool = flag(
        "Serve by replicas on Ray: on the cluster of RAY_ADDRESS, on that of this machine, or on one for this command."
    )
    replicas: int = option(1, "So many of them.", "N", least=1)
    autoscale: str | None = option(
        None, "In place of that as many as open requests need, of at least MIN and at most MAX.", "MIN:MAX",
        shown_default="always --replicas",
    )  # fmt: skip

    @property
    def range(self) -> tuple[int, int] | None:
        """The minimum and maximum number of replicas; None for one server without Ray."""
        if not self.ray:
            given = next((each.name for each in fields(self) if getattr(self, each.name) != each.default), None)
            if given is not None:
                raise OptionError("has no effect without --ray; give that, too", field=given)
            return None
        if self.autoscale is None:
            return self.replicas, self.replicas
        if self.replicas != 1:
            raise OptionError("has no effect with --autoscale; leave one of them out", field="replicas")
        found = re.fullmatch(r"(\d+):(\d+)", self.autoscale, re.ASCII)
        least, most = map(int, found.groups()) if found else (0, 0)
        if not 1 <= least <= most:
            raise OptionError(f"must be MIN:MAX with 1 <= MIN <= MAX, got {self.autoscale!r}", field="autoscale")
        return least, most


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address; an `OptionError` if there is none such, or it is in use."""
    if port > _LAST_PORT:
        raise OptionError(f"must be at most {_LAST_PORT}, got {port}", field="port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{host!r} cannot be listened on ({reason}); name an address", field="host") from error
    try:
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{port} on {host} cannot be listened on ({reason}); take another", field="port") from error
    return found
