"""The fields that requests of all endpoints share, and their conversion to the library's options.

An unknown field is refused, as by OpenAI's server; in messages (`LenientModel`) it is ignored, because each client adds
its own. Known fields without effect are in `Ignored`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from truedraft.core.budget import Speculation
from truedraft.core.params import SamplingParams, Structured
from truedraft.errors import OptionError
from truedraft.server.errors import invalid, quoted

_STRICT = ConfigDict(extra="forbid", strict=True)
_MOST_STOPS = 64
_MOST_BIASES = 1024
_MOST_LOGPROBS = 20

_Item = TypeVar("_Item")

MOST_ENTRIES = 8192
"""Limit of entries in a list of messages, items, parts or calls."""
Many = Annotated[list[_Item], Field(fail_fast=True)]  # a body may hold millions of invalid items; only one is reported
Items = Annotated[Many[_Item], Field(max_length=MOST_ENTRIES)]
Texts: TypeAlias = str | Items[str]


def checked_logprobs(name: str, count: int | None) -> int | None:
    """The number of top logprobs in the field `name`; an `ApiError` if it is out of range."""
    if count is not None and not 0 <= count <= _MOST_LOGPROBS:
        raise invalid(name, f"{name} must lie in 0 to {_MOST_LOGPROBS}, got {count}")
    return count


class Fields(BaseModel):
    """An object in a request: fields that are not known, and values of other types, are refused."""

    model_config = _STRICT

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {name for field, about in cls.model_fields.items() for name in (field, about.alias or field)}
        unknown = [name for name in given if name not in kept]
        kept.update(unknown[:1])
        return {name: value for name, value in given.items() if name in kept} if unknown[1:] else given


class LenientModel(Fields):
    """A part of a conversation; fields that are not known say nothing to a model."""

    model_config = ConfigDict(extra="ignore", strict=True)


def _few(given: Any) -> Any:
    """Limit a mapping's length before its pairs are validated."""
    if isinstance(given, dict) and len(given) > _MOST_BIASES:
        raise ValueError(f"holds {len(given)} entries, of at most {_MOST_BIASES}")
    return given


class Ignored(Fields):
    """Fields that are taken and change nothing: they are about accounts and storage, which there are none of here."""

    user: str | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_few)] = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: Annotated[dict[str, Any] | None, BeforeValidator(_few)] = None


class StreamOptions(Fields):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SpeculationFields(Fields):
    """What may be drafted for a request, within what the server drafts; none of it changes what is answered."""

    enabled: bool = Field(True, description="False answers by plain decoding.")
    drafter: str | Annotated[Items[str], Field(min_length=1)] | None = Field(
        None, description="Draft with these of the server's drafters only."
    )
    num_speculative_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Draft no longer paths.")
    rule: str | None = Field(None, description="Judge by this rule, if the server allows it.")
    trace: bool = Field(False, description="Tell of each token where it came from, and of each step its token tree.")

    @property
    def limits(self) -> Speculation:
        if not self.enabled:
            return Speculation(())
        names = [self.drafter] if isinstance(self.drafter, str) else self.drafter
        return Speculation(None if names is None else tuple(names), self.num_speculative_tokens)


class TextPart(LenientModel):
    """A part of a message that is text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(LenientModel):
    """A part of an earlier answer that declined."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_text_or_parts = Discriminator(
    lambda given: "text" if isinstance(given, str) else "parts" if isinstance(given, list) else None,
    custom_error_type="content",
    custom_error_message="must be a text or a list of parts",
)
TextOr = Annotated[Annotated[str, Tag("text")] | Annotated[Items[_Item], Tag("parts")], _text_or_parts]
"""A content: text, or parts."""
Content: TypeAlias = TextOr[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]


class Prediction(Fields):
    """Text that the answer is expected to repeat in large parts; it is drafted from."""

    type: Literal["content"] = "content"
    content: Content


class ImageUrl(LenientModel):
    """Where a picture is."""

    url: str
    detail: str | None = None  # no effect: the model's processor decides


class ImagePart(LenientModel):
    """A part of a chat's message that is a picture."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def url(self) -> str:
        return self.image_url.url


class InputImagePart(LenientModel):
    """The same as the newer endpoint has it."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None

    @property
    def url(self) -> str:
        return self.image_url


class Source(LenientModel):
    """Where a picture is, as Anthropic's clients say it."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(LenientModel):
    """A picture from these."""

    type: Literal["image"]
    source: Source

    @property
    def url(self) -> str:
        """The picture's URL, or its data as a data URL."""
        return self.source.url or f"data:{self.source.media_type};base64,{self.source.data}"


_Text: TypeAlias = TextPart | RefusalPart
_Picture: TypeAlias = ImagePart | InputImagePart | ImageBlock
_Part = Annotated[TextPart | RefusalPart | ImagePart | InputImagePart, Field(discriminator="type")]
SeenContent: TypeAlias = TextOr[_Part]


def text_of(content: Content) -> str:
    """The text of a content, with its parts concatenated."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def parts_of(content: str | Sequence[_Text | _Picture]) -> str | list[dict[str, str]]:
    """A content in the format of chat templates: its text, or if it has pictures its parts with their URLs."""
    if isinstance(content, str):
        return content
    if all(isinstance(part, _Text) for part in content):
        return "".join(part.text for part in content if isinstance(part, _Text))
    return [
        {"type": "text", "text": part.text} if isinstance(part, _Text) else {"type": "image", "url": part.url}
        for part in content
    ]


class StructuredFields(Fields):
    """A form that the answer must have; exactly one of these."""

    json_schema: dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="In Lark's notation.")
    json_object: bool | None = None

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    @property
    def form(self) -> Structured:
        given = [(name, value) for name, value in self if value is not None]
        if len(given) != 1:
            message = f"give one of json, regex, choice, grammar and json_object, got {len(given)}"
            raise invalid("structured_outputs", message)
        ((kind, value),) = given
        return Structured(kind, True if kind == "json_object" else value)


class JsonSchema(Fields):
    """A schema with a name."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's way to ask for a form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def form(self) -> Structured | None:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("response_format", "response_format of type json_schema needs json_schema")
        return json_form(self.type, None if self.json_schema is None else self.json_schema.schema_)


def json_form(kind: str, schema: dict[str, Any] | None) -> Structured | None:
    """The grammar of a JSON schema, or of any object if there is no schema; None for the kind "text"."""
    if kind == "json_object" or (kind == "json_schema" and schema is None):
        return Structured("json_object", True)
    return None if kind == "text" else Structured("json_schema", schema)


# The last two of the first, and the last three of the second, have no effect here.
_THINKING: dict[str, dict[str, type]] = {
    "thinking": {"type": str, "budget_tokens": int, "display": str, "clear_thinking": bool},
    "reasoning": {
        "max_tokens": int, "effort": str, "enabled": bool, "summary": str, "generate_summary": str, "exclude": bool
    },
}  # fmt: skip
"""The fields about reasoning of all clients, with the type of each key's values; numbers are 0 or more."""
_THINKS = ("enabled", "disabled", "adaptive", "auto")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The requested reasoning: `enabled` None leaves it to the model, and `budget` None does not limit its tokens."""

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None

    @classmethod
    def of(
        cls,
        budget: int | None,
        thinking: Mapping[str, Any] | None = None,
        reasoning: Mapping[str, Any] | None = None,
        effort: str | None = None,
    ) -> Thinking:
        """From the fields of Anthropic (`thinking`) and OpenAI (`reasoning`); an `ApiError` for unknown keys."""
        thinking, reasoning = thinking or {}, reasoning or {}
        for field, given in (("thinking", thinking), ("reasoning", reasoning)):
            for name, value in given.items():
                param = f"{field}.{name}"
                if name not in _THINKING[field]:
                    raise invalid(param, f"unrecognized request argument: {param}")
                fits = type(value) is _THINKING[field][name] and (type(value) is not int or value >= 0)
                if value is not None and not (fits and (name != "type" or value in _THINKS)):
                    raise invalid(param, f"{param} cannot be {quoted(value)}")
        word = effort or reasoning.get("effort")
        kind, enabled = thinking.get("type"), reasoning.get("enabled")
        budgets = (budget, thinking.get("budget_tokens"), reasoning.get("max_tokens"))
        budget = next((each for each in budgets if each is not None), None)
        if kind == "disabled" or word == "none" or enabled is False:
            return cls(False, budget)
        return cls(True if kind == "enabled" or enabled else None, budget, word)


class SamplingFields(Ignored):
    """How an answer is drawn and when it ends."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, description="The same seed, the same tokens, whatever drafts.")
    stop: Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few)] = None
    # Fields of other servers of open models.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Annotated[Many[int], Field(min_length=1)] | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    structured_outputs: StructuredFields | None = None
    # Fields of this server only.
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = None
    reasoning_budget: int | None = Field(None, description="Most tokens of reasoning before the answer of a chat.")

    @property
    def thinks(self) -> Thinking:
        return Thinking(budget=self.reasoning_budget)

    @property
    def samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def form_field(self) -> str:
        """The field that requests a grammar, for error messages."""
        for chosen, tools in (("tool_choice", "tools"), ("function_call", "functions")):
            choice = getattr(self, chosen, None)
            if getattr(choice, "type", choice) not in (None, "none", "auto"):
                return tools
        field_names = ("structured_outputs", "response_format", "text", "output_config")
        return next((name for name in field_names if getattr(self, name, None) is not None), field_names[0])

    @property
    def called(self) -> dict[str, str]:
        """The request's names of fields, by the library's, where they differ."""
        found = {"structured": self.form_field, "drafter": "speculation.drafter"}
        if (stop := type(self).model_fields["stop"].alias) is not None:
            found["stop"] = stop
        for other in ("max_completion_tokens", "max_output_tokens"):
            if getattr(self, other, None) is not None:
                found["max_tokens"] = other
        return found

    def sampling(
        self, max_tokens: int, *, logprobs: int | None = None, form: Structured | None = None
    ) -> SamplingParams:
        """The library's options; `form` is the grammar of an endpoint with its own field for it.

        An `OptionError` or `ApiError` with the request's names of fields if a value is out of range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        lists = {"stop": stop, "bad_words": self.bad_words or (), "stop_token_ids": self.stop_token_ids or ()}
        for name, values in lists.items():
            if len(values) > _MOST_STOPS:
                raise invalid(name, f"{name} holds {len(values)} entries, of at most {_MOST_STOPS}")
        try:
            own = None if self.structured_outputs is None else self.structured_outputs.form
            if form is not None and own is not None:
                raise invalid("structured_outputs", "structured_outputs and another form are requested; leave one out")
            given = {name: getattr(self, name) for name in _SHARED} | {
                "temperature": 1.0 if self.temperature is None else self.temperature,
                "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1 of other servers keeps all
                "stop": tuple(stop),
                "prompt_logprobs": checked_logprobs("prompt_logprobs", self.prompt_logprobs),
                "logprobs": logprobs,
                "structured": form if form is not None else own,
                "prediction": None if self.prediction is None else text_of(self.prediction.content) or None,
                "n": self.samples,
            }
            return SamplingParams(max_tokens, **{name: value for name, value in given.items() if value is not None})
        except OptionError as error:
            error.call_fields(self.called)
            error.field = self.called.get(error.field or "", error.field)
            raise


_SHARED = [each.name for each in dataclasses.fields(SamplingParams) if each.name in SamplingFields.model_fields]
"""Options with the same name in requests and in the library."""
