"""Prompts from images and text, by the processor of a model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from truedraft.errors import MissingExtraError, ModelError, PromptError, first_line
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.text.tokenizer import ChatOptions, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

Picture: TypeAlias = "Image"

_FILES = ("preprocessor_config.json", "processor_config.json")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # decoders of other formats are rarely used and rarely maintained
# Processors' names of image placeholders in a text; if there are both, the first is used.
_PLACES = ("boi_token", "image_token")
# Further tokens that a text may not contain, because the model would look for their inputs.
_INPUT_TOKENS = ("image_token", "video_token", "audio_token")
_REFUSALS = (AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, ValueError)
# Processors enlarge an image until its shorter side has some hundred pixels, and the longer one with it.
_LONGEST = 50  # times the shorter side


class Processor:
    """A model's own processor, for prompts with images; `backend` is transformers' processor."""

    def __init__(self, backend: Any, name: str) -> None:
        self._backend = backend
        self._name = name
        self._tokenizer = Tokenizer(backend.tokenizer, name)
        self._lock = threading.Lock()  # tokenizers are not thread-safe; many images at once take much memory

    @classmethod
    def load(cls, source: str, name: str, revision: str | None = None) -> Processor:
        """A model's processor, from folder or hub; MissingExtraError without Pillow, ModelError if unreadable."""
        _pillow()
        from transformers import AutoProcessor

        folder, backend = Path(source), None
        if not folder.is_dir() or any((folder / file).is_file() for file in _FILES):
            try:
                backend = AutoProcessor.from_pretrained(
                    source, revision=revision, trust_remote_code=False, local_files_only=folder.is_dir()
                )
            except Exception as error:
                raise ModelError(
                    f"the processor of {name!r} cannot be read ({first_line(error)}); fetch its files again, "
                    "preprocessor_config.json among them"
                ) from error
        if getattr(backend, "image_processor", None) is None or getattr(backend, "tokenizer", None) is None:
            raise ModelError(
                f"{name!r} sees, and comes without the processor that makes its prompts; fetch its "
                "preprocessor_config.json and tokenizer files"
            )
        return cls(backend, name)

    @property
    def chat_template(self) -> str | None:
        found = getattr(self._backend, "chat_template", None)
        return found if isinstance(found, str) else None

    def prompt(self, text: str, pictures: Sequence[Picture]) -> MultimodalPrompt:
        """A text with images at its placeholders, or else before it; PromptError if refused, or they do not match."""
        place = next(iter(self._places), None)
        if place is not None and not any(each in text for each in self._places):
            text = f"{place * len(pictures)}\n{text}"
        return self._made(text, pictures, special_tokens=True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        pictures: Sequence[Picture],
        **how: Unpack[ChatOptions],
    ) -> MultimodalPrompt:
        """A conversation by the model's chat template, with `pictures` of its parts of type "image", in order.

        Raises:
            PromptError: the template or the processor refuses them, or they spell control tokens.
            OptionError: see `Tokenizer.chat`.
        """
        converted: list[dict[str, Any]] = [dict(each) for each in messages]
        for each in converted:  # as lists of parts, for templates with images
            if isinstance(each["content"], str):
                each["content"] = [{"type": "text", "text": each["content"]}]
        how["template"] = how.get("template") or self.chat_template
        text = self._tokenizer.chat_text(converted, **how)
        return self._made(text, pictures, special_tokens=False)

    @property
    def _places(self) -> list[str]:
        found = [getattr(self._backend, name, None) for name in _PLACES]
        return [str(each) for each in found if each is not None]

    def _made(self, text: str, pictures: Sequence[Picture], *, special_tokens: bool) -> MultimodalPrompt:
        places = self._places
        used = next((each for each in places if each in text), places[0] if places else "")
        held = text.count(used) if used else 0
        if places and held != len(pictures):
            raise PromptError(
                f"the prompt has {held} places for pictures ({places[0]}), and {len(pictures)} pictures are given"
            )
        holders = (self._backend, self._backend.tokenizer)
        for other in (getattr(holder, name, None) for holder in holders for name in _INPUT_TOKENS):
            if other and str(other) != used and str(other) in text:
                raise PromptError(f"the prompt holds {other}, and nothing that stands there is given; leave it out")
        try:
            with self._lock:
                encoded = self._backend(
                    text=text, images=list(pictures), return_tensors="pt", add_special_tokens=special_tokens
                )
        except _REFUSALS as error:
            raise PromptError(f"the processor of {self._name!r} refuses this prompt ({first_line(error)})") from error
        return MultimodalPrompt.of(encoded)


def read_picture(source: Path | bytes, what: str, most_pixels: int | None = None) -> Picture:
    """An image in RGB, upright, from a file or its content; the first of several frames.

    Args:
        what: its name in messages.
        most_pixels: upper bound, checked before decoding; None is Pillow's limit against decompression bombs.

    Raises:
        MissingExtraError: Pillow is not installed.
        PromptError: there is no such file, it is no image, too large, or too long for its width.
    """
    _pillow()
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as picture:
            width, height = picture.size
            if most_pixels is not None and width * height > most_pixels:
                raise PromptError(f"{what} has {width} x {height} pixels, of at most {most_pixels}; make it smaller")
            if max(width, height) > _LONGEST * min(width, height):
                raise PromptError(
                    f"{what} has {width} x {height} pixels, one side more than {_LONGEST} times the other; cut it"
                )
            return ImageOps.exif_transpose(picture).convert("RGB")
    except PromptError:
        raise
    except FileNotFoundError as error:
        raise PromptError(f"there is no file {what}; check the path") from error
    except (Image.DecompressionBombError, MemoryError) as error:
        reason = str(error).partition(",")[0] or "there is no memory for it"
        raise PromptError(f"{what} is too large ({reason}); make it smaller") from error
    except Exception as error:  # decoders raise many kinds: for broken files SyntaxError, struct.error and others
        reason = getattr(error, "strerror", None) or f"it must be one of {', '.join(_FORMATS)}"
        raise PromptError(f"{what} cannot be read as a picture ({reason})") from error


def _pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pictures need Pillow; install it by: pip install 'truedraft[images]'") from error
