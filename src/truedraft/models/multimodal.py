"""Prompts with images or audio in addition to text, as a model's processor makes them.

The processor puts one placeholder token into the text for each position of an image, and returns the pixels separately.
For an encoder of audio, a prompt is the audio followed by the decoder's first tokens. Drafters see tokens only.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import torch
from torch import Tensor

from truedraft.errors import MissingExtraError, ModelError, PromptError, first_line
from truedraft.models.cache import RequestCache
from truedraft.text.tokenizer import ChatOptions, Tokenizer

if TYPE_CHECKING:  # imported lazily: transformers takes seconds, and Pillow is optional
    from PIL.Image import Image
    from transformers import PreTrainedModel

# Parts of a configuration, and the inputs that they stand for.
_SENSES = {"vision_config": "images", "audio_config": "sound", "encoder_config": "sound"}
_PLACED = ("image", "video", "audio", "vision")
_IDS = ("_token_id", "_token_index")
_TEXT_KEYWORDS = {
    "self", "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "inputs_embeds", "labels",
    "use_cache", "logits_to_keep", "cache_position", "kwargs", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "rope_deltas",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalPrompt:
    """One prompt as a processor made it.

    Attributes:
        token_ids: with the processor's placeholders of images or audio. For an encoder-decoder of audio, the decoder's
            first tokens; empty for its default ones.
        inputs: other arguments of the model's forward, by keyword, such as `pixel_values`; on any device.
        digest: a hash of all of that, computed when the prompt is made, so do not change its tensors.

    Raises:
        PromptError: there are no other inputs, or one is no tensor.
    """

    token_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor] = field(repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.inputs:
            raise PromptError("a MultimodalPrompt has tokens only; give these as the prompt")
        for name, value in self.inputs.items():
            if not isinstance(value, Tensor):
                raise PromptError(
                    f"{name!r} of a MultimodalPrompt is a {type(value).__name__}; call the processor with "
                    'return_tensors="pt"'
                )
        found = hashlib.sha256(repr([int(token) for token in self.token_ids]).encode())
        for name, value in sorted(self.inputs.items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", found.digest())

    @classmethod
    def of(cls, encoded: Mapping[str, Any]) -> MultimodalPrompt:
        """From a processor's output with `return_tensors="pt"`; PromptError if not of one text without padding."""
        rest = dict(encoded)
        ids, mask = rest.pop("input_ids", None), rest.pop("attention_mask", None)
        if not isinstance(ids, Tensor):
            raise PromptError('the processor returned no tensor of input_ids; call it with return_tensors="pt"')
        if ids.dim() == 2 and len(ids) > 1:
            raise PromptError(f"the processor returned {len(ids)} texts; make a MultimodalPrompt of each")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise PromptError("the processor padded the text; call it without padding")
        if ids.numel() < 2:
            raise PromptError("a MultimodalPrompt has at least a placeholder, followed by a token of text")
        return cls(tuple(ids.flatten().tolist()), rest)

    @classmethod
    def heard(cls, encoded: Mapping[str, Any], begun: Sequence[int] = ()) -> MultimodalPrompt:
        """From the output of an encoder-decoder's feature extractor for one audio clip, such as Whisper's.

        `begun` are the decoder's first tokens, such as a language and a task; empty for its default ones. Raises
        PromptError: there is no audio, or padding.
        """
        rest = dict(encoded)
        mask = rest.pop("attention_mask", None)
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise PromptError("the feature extractor padded the sound and marked where; call it without attention_mask")
        return cls(tuple(begun), rest)


def senses_of(model: PreTrainedModel) -> list[str]:
    """The model's inputs other than text, in words."""
    return [what for part, what in _SENSES.items() if getattr(model.config, part, None) is not None]


def input_names_of(model: PreTrainedModel) -> frozenset[str]:
    """Keywords of a model's forward for inputs other than text; empty for a text-only model."""
    if not senses_of(model):
        return frozenset()
    return frozenset(inspect.signature(type(model).forward).parameters) - _TEXT_KEYWORDS


def placeholders_of(model: PreTrainedModel) -> frozenset[int]:
    """Ids that other inputs replace, or that frame these."""
    return frozenset(
        value
        for name, value in model.config.to_dict().items()
        if name.startswith(_PLACED) and name.endswith(_IDS) and isinstance(value, int)
    )


@contextmanager
def noting_shift(model: PreTrainedModel, cache: RequestCache) -> Iterator[None]:
    """Store the shift of positions after a prompt that a model reads, and numbers itself, within this context.

    Images take fewer positions than tokens where rotary positions have more than one axis (Qwen2-VL, 2409.12191,
    section 2.1): `rope_deltas` in transformers. Others begin at 1 (PaliGemma).
    """
    for module in model.modules():  # so that no value of an earlier prompt is taken
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None
    shift = 0

    def look(_: Any, __: Any, given: Mapping[str, Any]) -> None:
        nonlocal shift
        places = given.get("position_ids")
        if isinstance(places, Tensor):
            shift = int(places.flatten()[-1]) + 1 - places.shape[-1]

    handle = model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    deltas = (getattr(module, "rope_deltas", None) for module in model.modules())
    found = next((each for each in deltas if isinstance(each, Tensor)), None)
    cache.family.shift = shift if found is None else int(found.flatten()[0])


def on_device(inputs: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs on the model's device; floating-point ones in its dtype."""
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
    }


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
        self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture], **how: Unpack[ChatOptions]
    ) -> MultimodalPrompt:
        """A conversation by the model's chat template, with `pictures` of its parts of type "image", in order.

        Raises PromptError: the template or the processor refuses them, or they spell control tokens; OptionError: see
        `Tokenizer.chat`.
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
    """An image in RGB, upright, from a file or its content, named `what` in messages; the first of several frames.

    At most `most_pixels`, checked before decoding; None is Pillow's limit against decompression bombs. Raises
    MissingExtraError: Pillow is not installed; PromptError: there is no such file, it is no image, too large, or too
    long for its width.
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
