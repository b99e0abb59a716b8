"""Pictures in chats: what the library answers to them, within limits, and nothing fetched."""

from __future__ import annotations

import base64
import contextlib
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import openai
from PIL import Image

from server.conftest import TEMPLATE as TEXT_TEMPLATE
from server.conftest import Running, openai_client, serving
from server.test_load import wait_for
from support.multimodal_models import save_with_processor
from truedraft import Engine, SamplingParams, load_model
from truedraft.errors import PromptError
from truedraft.models import multimodal
from truedraft.models.base import LanguageModel
from truedraft.server import preparing as server_pictures
from truedraft.server.access import ANYONE
from truedraft.server.errors import ApiError
from truedraft.server.service import ResponseHandle, Service

QUESTION = "What is in this picture?"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %} {% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "seeing"
    save_with_processor(made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def seeing(folder: Path) -> LanguageModel:
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def running(seeing: LanguageModel) -> Iterator[Running]:
    with serving(Engine(seeing, "prompt-lookup"), max_body_bytes="2M") as found:
        yield found


def url_of(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def encoded(picture: Image.Image, kind: str = "png") -> str:
    held = BytesIO()
    picture.save(held, kind)
    return url_of(held.getvalue(), kind)


NOISE = Image.effect_noise((30, 50), 80).convert("RGB")
TEAL = Image.new("RGB", (40, 30), "teal")


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def message(*urls: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part, urls), {"type": "text", "text": QUESTION}]}]


def ask(client: Any, messages: Any, **more: Any) -> str:
    found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0, **more)
    text: str = found.choices[0].message.content
    return text


def expected(seeing: LanguageModel, text: str, *pictures: Image.Image) -> str:
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    prompt = seeing.processor.chat([{"role": "user", "content": parts}], pictures)
    return Engine(seeing).generate(prompt, SamplingParams(max_tokens=12)).text or ""


def test_a_chat_about_pictures(client: Any, seeing: LanguageModel) -> None:
    answers = [expected(seeing, QUESTION, NOISE), expected(seeing, QUESTION, TEAL, NOISE)]
    assert ask(client, message(encoded(NOISE))) == answers[0]
    assert ask(client, message(encoded(TEAL), encoded(NOISE))) == answers[1] != answers[0]
    text = ask(client, [{"role": "user", "content": QUESTION}])
    assert text == ask(client, [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}])
    assert text not in answers
    streamed = client.chat.completions.create(
        model="tiny", messages=message(encoded(NOISE)), max_tokens=12, temperature=0, stream=True
    )
    assert "".join(each.choices[0].delta.content or "" for each in streamed if each.choices) == answers[0]


def test_a_conversation_goes_on(client: Any, seeing: LanguageModel) -> None:
    first = message(encoded(NOISE))
    told = [*first, {"role": "assistant", "content": "Noise."}, {"role": "user", "content": "Sure?"}]
    text = f"user: <image>{QUESTION} assistant: Noise. user: Sure? assistant:"
    prompt = seeing.processor.prompt(text, [NOISE])
    assert ask(client, told) == Engine(seeing).generate(prompt, SamplingParams(max_tokens=12)).text


def test_a_template_that_refuses_gets_a_plainer_form(seeing: LanguageModel, tmp_path: Path) -> None:
    template = tmp_path / "one_system.jinja"
    only_first = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('one system') }}{% endif %}"
    template.write_text(TEMPLATE.replace("%}", "%}" + only_first, 1))
    late = {"role": "system", "content": "Be brief."}
    with serving(Engine(seeing, "prompt-lookup"), chat_template=template) as found:
        client = openai_client(found)
        prompt = seeing.processor.prompt(f"user: <image>{QUESTION} user: Be brief. assistant:", [NOISE])
        wanted = Engine(seeing).generate(prompt, SamplingParams(max_tokens=12)).text
        assert ask(client, [*message(encoded(NOISE)), late]) == wanted


def test_samples_and_the_newer_endpoint(client: Any, seeing: LanguageModel) -> None:
    asked = {"model": "tiny", "messages": message(encoded(NOISE)), "max_tokens": 12, "temperature": 1.0}
    found = client.chat.completions.create(**asked, seed=3, n=3)
    assert len({each.message.content for each in found.choices}) == 3
    parts = [{"type": "input_image", "image_url": encoded(NOISE)}, {"type": "input_text", "text": QUESTION}]
    answer = client.responses.create(
        model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=12, temperature=0
    )
    assert answer.output_text == expected(seeing, QUESTION, NOISE)


def header_of(width: int, height: int) -> bytes:
    """The beginning of a PNG that says that it is so large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


def test_what_is_refused(client: Any) -> None:
    for urls, told in (
        (["https://example.org/a.png"], "this server fetches nothing, got 'https://example.org/a.png'"),
        (["http://169.254.169.254/latest"], "this server fetches nothing"),
        (["file:///etc/passwd"], "this server fetches nothing, got 'file:///etc/passwd'"),
        (["/etc/passwd"], "this server fetches nothing"),
        (["data:text/html;base64,AAAA"], "must be a data URL"),
        (["data:image/png,AAAA"], "must be a data URL"),
        (["data:image/png;base64,&&&&"], "a picture is no base64"),
        ([url_of(b"no picture")], "picture 1 of messages cannot be read as a picture"),
        ([url_of(header_of(30_000, 30_000))], "is too large (Image size (900000000 pixels) exceeds"),  # by Pillow
        ([url_of(header_of(4_000, 1))], "4000 x 1 pixels, one side more than 50 times the other; cut it"),
        ([url_of(header_of(2, 4_000))], "2 x 4000 pixels, one side more than 50 times the other; cut it"),
        ([url_of(header_of(4_000, 3_000))], "has 4000 x 3000 pixels, of at most 8388608"),
        ([encoded(Image.new("RGB", (2_400, 2_000)))] * 2, "picture 2 of messages has 2400 x 2000 pixels, of at"),
        ([encoded(TEAL)] * 17, "holds 17 pictures, of at most 16"),
        ([url_of(header_of(40, 30))], "cannot be read as a picture"),  # it ends too early
        ([encoded(TEAL, "bmp")], "cannot be read as a picture"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, message(*urls))
        body: Any = refused.value.body
        assert told in body["message"] and body["param"] == "messages" and "\n" not in body["message"]


def test_a_text_that_names_a_place_is_refused(client: Any) -> None:
    told = message(encoded(TEAL))
    told[0]["content"][1]["text"] = "<image> and this?"
    with pytest.raises(openai.BadRequestError, match="control token of 'tiny'"):
        ask(client, told)


def test_pictures_are_read_apart(client: Any, monkeypatch: pytest.MonkeyPatch, running: Running) -> None:
    """Other clients are served meanwhile, however short the body."""
    going, waited = threading.Event(), threading.Event()
    made = multimodal.Processor.chat

    def slow(*given: Any, **more: Any) -> Any:
        going.set()
        assert waited.wait(20)
        return made(*given, **more)

    monkeypatch.setattr(multimodal.Processor, "chat", slow)
    asking = threading.Thread(target=ask, args=(client, message(encoded(TEAL))))
    asking.start()
    try:
        assert going.wait(20)
        assert ask(client, [{"role": "user", "content": "Meanwhile?"}])
    finally:
        waited.set()
        asking.join(20)


@contextlib.contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Meanwhile no picture is read; the numbers of those whose reading began."""
    begun, waited = list[int](), threading.Event()
    made = server_pictures.read_pictures

    def slow(urls: Any, param: str) -> Any:
        begun.append(len(begun))
        assert waited.wait(20)
        return made(urls, param)

    monkeypatch.setattr(server_pictures, "read_pictures", slow)
    try:
        yield begun
    finally:
        waited.set()


def test_places_are_taken_before_pictures_are_read(seeing: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Engine(seeing), max_per_client=1) as running:
        client = openai_client(running)
        with held_up(monkeypatch) as begun:
            asking = threading.Thread(target=ask, args=(client, message(encoded(TEAL))))
            asking.start()
            wait_for(lambda: bool(begun))
            for _ in range(3):
                with pytest.raises(openai.RateLimitError, match="1 requests open, of at most 1"):
                    ask(client, message(encoded(TEAL)))
            assert begun == [0]
        asking.join(20)
        with pytest.raises(openai.BadRequestError):
            ask(client, message(url_of(b"no picture")))
        assert ask(client, message(encoded(TEAL)))  # all places were given back


def test_few_wait_for_their_pictures_and_texts_do_not(
    client: Any, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = server_pictures.MOST_READ
    refused: list[str] = []

    def asked() -> None:
        try:
            ask(client, message(encoded(TEAL)))
        except openai.RateLimitError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=asked) for _ in range(most + 2)]
    with held_up(monkeypatch) as begun:
        for thread in threads:
            thread.start()
        wait_for(lambda: len(refused) == 2)
        assert begun == [0] and f"pictures of {most} requests" in refused[0]
        long = {"chat_template_kwargs": {"unread": "long" * 2000}}  # so that it is prepared in a thread, too
        assert ask(client, [{"role": "user", "content": "Meanwhile?"}], extra_body=long)
    for thread in threads:
        thread.join(20)
    assert len(refused) == 2


def test_pixels_that_wait_are_bounded(seeing: LanguageModel) -> None:
    engine = Engine(seeing, max_batch=1)
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = seeing.processor.chat([{"role": "user", "content": parts}], [NOISE])
    size = sum(value.nbytes for value in prompt.inputs.values())
    service = Service(engine, max_waiting_bytes=2 * size - 1)

    def begin(*prompts: Any) -> None:
        ResponseHandle(service).start([engine.prepare(each, SamplingParams(max_tokens=2)) for each in prompts], ANYONE)

    begin(prompt, prompt)  # samples share it
    begin("Text")
    other = seeing.processor.chat([{"role": "user", "content": parts}], [TEAL])
    with pytest.raises(ApiError, match=f"pictures of {size} bytes wait already, of at most {2 * size - 1}") as refused:
        begin(other)
    assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1 and service.waiting == 3


def test_a_text_that_names_what_is_not_there_is_refused(seeing: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = seeing.processor
    for name, word in (("video_token", "<|video_pad|>"), ("image_token", "<soft>")):
        monkeypatch.setattr(processor._backend.tokenizer, name, word, raising=False)
        with pytest.raises(PromptError, match="nothing that stands there is given; leave it out") as refused:
            processor.prompt(f"<image> {word}", [TEAL])
        assert word in str(refused.value)


def test_no_memory_is_told(seeing: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError

    held = BytesIO()
    TEAL.save(held, "png")
    with monkeypatch.context() as patched:
        patched.setattr(Image.Image, "convert", fails)
        with pytest.raises(PromptError, match=r"it is too large \(there is no memory for it\)"):
            multimodal.read_picture(held.getvalue(), "it")
    monkeypatch.setattr(type(seeing.processor._backend), "__call__", fails)
    with pytest.raises(PromptError, match=r"refuses this prompt \(MemoryError\)"):
        seeing.processor.prompt(QUESTION, [TEAL])


def test_a_model_of_text_takes_none(target: LanguageModel, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEXT_TEMPLATE)
    with serving(Engine(target), chat_template=template) as running:
        client = openai_client(running)
        with pytest.raises(openai.BadRequestError, match="takes no pictures; give text alone"):
            ask(client, message(encoded(TEAL)))


def test_a_model_without_its_processor_tells_no_paths(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*processor_config.json"))
    loads: list[str] = []
    load = multimodal.Processor.load

    def counted(*given: Any) -> Any:
        loads.append(given[1])
        return load(*given)

    monkeypatch.setattr(multimodal.Processor, "load", counted)
    with serving(Engine(load_model(bare, dtype="float32"))) as running:
        client = openai_client(running)
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="this server reads no pictures") as refused:
                ask(client, message(encoded(TEAL)))
        assert len(loads) == 1  # of all requests
        assert str(tmp_path) not in str(refused.value.body)
