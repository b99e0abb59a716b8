"""From pictures and a text to a prompt, by the processor that comes with a model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from truedraft.errors import MissingExtraError, ModelError, PromptError
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.text.tokenizer import ChatOptions, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

Picture: TypeAlias = "Image"

_FILES = ("preprocessor_config.json", "processor_config.json")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # decoders of others are seldom used, and seldom mended
# How processors call what stands for a picture in a text; where there are both the first one does.
_PLACES = ("boi_token", "image_token")
# What else a text may not hold, for the model would look for what stands there.
_SOUGHT = ("image_token", "video_token", "audio_token")
# What they raise where a text or a picture does not suit them.
_REFUSALS = (AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, ValueError)
# Processors enlarge a picture until its shorter side has some hundred pixels, and the longer one with it.
_LONGEST = 50  # times the shorter side


class Processor:
    """A model's own processor, for prompts with pictures.

    Args:
        backend: from transformers; it has an image processor and a tokenizer.
        name: what messages call the model.
    """

    def __init__(self, backend: Any, name: str) -> None:
        self._backend = backend
        self._name = name
        self._tokenizer = Tokenizer(backend.tokenizer, name)
        self._lock = threading.Lock()  # tokenizers do not bear two threads, nor memory many pictures at once

    @classmethod
    def load(cls, source: str, name: str, revision: str | None = None) -> Processor:
        """The one in a model's folder, or under its name on the hub.

        Raises:
            MissingExtraError: Pillow is not installed.
            ModelError: there is none, or it cannot be read.
        """
        _pillow()
        from transformers import AutoProcessor

        folder = Path(source)
        if folder.is_dir() and not any((folder / file).is_file() for file in _FILES):
            raise _without_processor(name)
        try:
            backend = AutoProcessor.from_pretrained(
                source, revision=revision, trust_remote_code=False, local_files_only=folder.is_dir()
            )
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ModelError(
                f"the processor of {name!r} cannot be read ({first}); fetch its files again, preprocessor_config.json "
                "among them"
            ) from error
        if getattr(backend, "image_processor", None) is None or getattr(backend, "tokenizer", None) is None:
            raise _without_processor(name)
        return cls(backend, name)

    @property
    def chat_template(self) -> str | None:
        """That for messages with pictures, where it is not the tokenizer's."""
        found = getattr(self._backend, "chat_template", None)
        return found if isinstance(found, str) else None

    def prompt(self, text: str, pictures: Sequence[Picture]) -> MultimodalPrompt:
        """A text with pictures where its placeholders are; before it where there are none.

        Raises:
            PromptError: there are others than pictures, or the processor refuses them.
        """
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
        """A conversation by the model's chat template.

        Args:
            messages: contents may be lists of parts, of type "text" and "image".
            pictures: of the parts of type "image", in order.
            how: see `ChatOptions`.

        Raises:
            PromptError: the template or the processor refuses them, or they spell control tokens.
            OptionError: as `Tokenizer.chat`.
        """
        told = [{**each, "content": _parts(each["content"])} for each in messages]
        how["template"] = how.get("template") or self.chat_template
        text = self._tokenizer.chat_text(told, **how)
        return self._made(text, pictures, special_tokens=False)

    @property
    def _places(self) -> list[str]:
        found = [getattr(self._backend, name, None) for name in _PLACES]
        return [str(each) for each in found if each is not None]

    @property
    def _sought(self) -> set[str]:
        holders = (self._backend, self._backend.tokenizer)
        found = [getattr(holder, name, None) for holder in holders for name in _SOUGHT]
        return {str(each) for each in found if each}

    def _made(self, text: str, pictures: Sequence[Picture], *, special_tokens: bool) -> MultimodalPrompt:
        places = self._places
        used = next((each for each in places if each in text), places[0] if places else "")
        held = text.count(used) if used else 0
        if places and held != len(pictures):
            raise PromptError(
                f"the prompt has {held} places for pictures ({places[0]}), and {len(pictures)} pictures are given"
            )
        for other in self._sought - {used}:
            if other in text:
                raise PromptError(f"the prompt holds {other}, and nothing that stands there is given; leave it out")
        try:
            with self._lock:
                encoded = self._backend(
                    text=text, images=list(pictures), return_tensors="pt", add_special_tokens=special_tokens
                )
        except _REFUSALS as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise PromptError(f"the processor of {self._name!r} refuses this prompt ({first})") from error
        return MultimodalPrompt.of(encoded)


def read_picture(source: Path | bytes, what: str, most_pixels: int | None = None) -> Picture:
    """A picture in RGB, upright, of a file or what stands in one; of several frames the first.

    Args:
        source: the file, or its content.
        what: messages call it so.
        most_pixels: that it may have; None is what Pillow takes for an attack. It is known before any is decoded.

    Raises:
        MissingExtraError: Pillow is not installed.
        PromptError: there is no such file, it is no picture, too large, or too long for its width.
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
        told = str(error).partition(",")[0] or "there is no memory for it"
        raise PromptError(f"{what} is too large ({told}); make it smaller") from error
    except Exception as error:  # decoders raise what they like: for broken files SyntaxError, struct.error and others
        told = getattr(error, "strerror", None) or f"it must be one of {', '.join(_FORMATS)}"
        raise PromptError(f"{what} cannot be read as a picture ({told})") from error


def _parts(content: Any) -> Any:
    """A message's content in parts, as templates that know pictures go through them."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _without_processor(name: str) -> ModelError:
    return ModelError(
        f"{name!r} sees, and comes without the processor that makes its prompts; fetch its preprocessor_config.json "
        "and tokenizer files"
    )


def _pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pictures need Pillow; install it by: pip install 'truedraft[images]'") from error
