"""`truedraft generate` of pictures."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from cli.tiny import Result, Run, prompts_in
from support.multimodal_models import save_with_processor

QUESTION = "What is in this picture?"
TOKENS = ("--max-tokens", "12", "--dtype", "float32", "--ignore-eos", "--json", "--drafter", "prompt-lookup")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "seeing"
    save_with_processor(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    files = [folder / "teal.png", folder / "noise.jpg"]
    Image.new("RGB", (40, 30), "teal").save(files[0])
    Image.effect_noise((30, 50), 80).save(files[1])
    return list(map(str, files))


def generated(folder: str, text: str, files: list[str], **how: Any) -> list[int]:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    images = [Image.open(file).convert("RGB") for file in files]
    encoded = processor(text=text, images=images, return_tensors="pt", **how)
    answer = model.generate(**encoded, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    tokens: list[int] = answer[0, encoded["input_ids"].shape[1] :].tolist()
    return tokens


def answers(result: Result) -> list[list[int]]:
    assert result.status == 0, result.err
    return [each["token_ids"] for each in result.record["prompts"]]


def test_a_picture_and_a_question(run: Run, seeing: str, pictures: list[str]) -> None:
    first, second = ("--image", pictures[0]), ("--image", pictures[1])
    one = answers(run("generate", QUESTION, "--model", seeing, *first, *TOKENS))
    assert one == [generated(seeing, f"<image>\n{QUESTION}", pictures[:1])]
    two = answers(run("generate", f"<image> or <image>? {QUESTION}", "--model", seeing, *first, *second, *TOKENS))
    assert two == [generated(seeing, f"<image> or <image>? {QUESTION}", pictures)]
    swapped = answers(run("generate", f"<image> or <image>? {QUESTION}", "--model", seeing, *second, *first, *TOKENS))
    assert one != two != swapped


def test_a_chat_about_a_picture(run: Run, seeing: str, pictures: list[str]) -> None:
    found = answers(run("generate", QUESTION, "--model", seeing, "--image", pictures[0], "--chat", *TOKENS))
    text = f"user: <image>{QUESTION} assistant:"
    assert found == [generated(seeing, text, pictures[:1], add_special_tokens=False)]


def test_lines_name_their_own(run: Run, seeing: str, pictures: list[str], tmp_path: Path) -> None:
    lines = [
        {"prompt": QUESTION, "images": pictures[:1]},
        {"prompt": "import os"},
        {"text": "Why?", "images": pictures},
    ]
    found = answers(run("generate", "--prompts", prompts_in(tmp_path, *lines), "--model", seeing, *TOKENS))
    assert found[0] == generated(seeing, f"<image>\n{QUESTION}", pictures[:1])
    assert found[1] == answers(run("generate", "import os", "--model", seeing, *TOKENS))[0]
    assert found[2] == generated(seeing, "<image><image>\nWhy?", pictures)


def refused(result: Result, told: str, status: int = 2) -> None:
    assert result.status == status
    assert told in result.err and len(result.err.strip().splitlines()) == 1


def test_what_cannot_be_shown_is_told_in_a_sentence(
    run: Run, seeing: str, target: str, pictures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ("--image", pictures[0])
    refused(run("generate", QUESTION, "--model", target, *image), "takes no pictures; give text alone")
    text, none = tmp_path / "text.png", str(tmp_path / "none.png")
    text.write_text("no picture")
    refused(
        run("generate", QUESTION, "--model", seeing, "--image", str(text)), "cannot be read as a picture (it must be"
    )
    refused(run("generate", QUESTION, "--model", seeing, "--image", str(tmp_path)), "cannot be read as a picture (Is a")
    refused(run("generate", QUESTION, "--model", seeing, "--image", none), "there is no file")
    refused(run("generate", QUESTION, "--model", seeing, "--image", ""), "names no file; give its path")
    told = "the prompt has 2 places for pictures (<image>), and 1 pictures are given"
    refused(run("generate", "<image><image>", "--model", seeing, *image), told)
    refused(run("generate", QUESTION, "--model", seeing, *image, "--compare"), "--compare needs prompts of text")
    refused(run("generate", "--prompts", "heldout", *image), "--image is for one PROMPT")
    bare = tmp_path / "bare"
    shutil.copytree(seeing, bare, ignore=shutil.ignore_patterns("*processor_config.json"))
    refused(run("generate", QUESTION, "--model", str(bare), *image), "fetch its preprocessor_config.json", 1)
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused(run("generate", QUESTION, "--model", seeing, *image), "pip install 'truedraft[images]'", 1)
