"""The base of all heads: modules on the target's last hidden state, their record, and their files.

A kind of head is a subclass of `Head` with a dataclass of its sizes. On disk a head is a folder with `config.json`,
written last so that an incomplete checkpoint is not loaded, `heads.safetensors`, and a JSON file of measurements.
"""

from __future__ import annotations

import contextlib
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from truedraft.core.rank_tree import RankTree
from truedraft.drafters.kinds import KINDS, dotted, kind_in
from truedraft.errors import CompositionError, ModelError, ModelNotFoundError, OptionError, first_line
from truedraft.files import user_path
from truedraft.machine import DTYPES, dtype_name
from truedraft.models.backends.native.linear import is_fastest, native_linears
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import embedded_heads
from truedraft.models.lm_head import LmHead
from truedraft.models.mapped import in_memory
from truedraft.models.packed_linear import PackedLinear, can_pack

Unembed: TypeAlias = Callable[[Tensor], Tensor]
"""The target's LM head: vectors `[rows, width]` to logits `[rows, vocab]`, its scale and soft-cap applied."""
Product: TypeAlias = Callable[[Tensor], Tensor]
"""A linear layer as it runs between two forwards of the target."""

FETCH_AGAIN = "fetch the file again"
_TINY = 1e-20  # an embedding of zeros stays one
_AGAIN = "fetch or train the heads again"  # advice for a damaged file
_VERSION = 1
MOST_MODULES = 1024
"""Maximum layers, blocks or guesses of a head: a manipulated file with more could use up all memory."""
_CONFIG, _WEIGHTS, _EMBEDDED = "config.json", "heads.safetensors", "embedded:"
_PUBLISHED = ("model.safetensors", "pytorch_model.bin")


class HeadConfig(Protocol):
    """A dataclass with the fields of `config.json`; `width` is that of the LM head's input."""

    @property
    def width(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """What is known about a head in addition to its weights.

    Attributes:
        target_name: at training; "" if unknown.
        fingerprint: `LanguageModel.fingerprint` of that target; `sample` is its `LanguageModel.sample`.
        trees: counted trees of ranks: "greedy" for requests at temperature 0, "sampled" for others.
        note: for the user, about a file that does not name its target.
    """

    target_name: str = ""
    fingerprint: str | None = None
    trees: Mapping[str, RankTree] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None
    sample: str | None = None

    def names(self, target: LanguageModel) -> bool:
        """Whether the target's weights are those of the recorded target, if any."""
        if self.sample is not None and (sample := target.sample) is not None:
            return self.sample == sample
        return self.fingerprint is None or self.fingerprint == target.fingerprint


class Head(nn.Module, ABC):
    """Guesses `reach` tokens after the one that was drawn from a hidden state of the target.

    Attributes:
        kind: in `config.json`, of the training command, and of the drafter; `noun` and `plural` are for messages.
        place_word: a position in a training's log.
        reads_layers: whether it reads several of the target's layers, those in `config.layers`.
    """

    kind: ClassVar[str]
    noun: ClassVar[str]
    plural: ClassVar[str]
    place_word: ClassVar[str]
    sizes: ClassVar[type[Any]]
    facts_file: ClassVar[str] = "facts.json"
    reads_layers: ClassVar[bool] = False

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.record = HeadRecord()

    @property
    @abstractmethod
    def reach(self) -> int: ...
    @property
    @abstractmethod
    def reads_tokens(self) -> bool: ...
    @property
    @abstractmethod
    def outputs(self) -> Sequence[nn.Linear | None]:
        """The output layer of each position; None is the target's LM head."""

    @abstractmethod
    def start_from(self, weight: Tensor) -> None:
        """Initialize its own outputs with the LM head's weight `[vocab, width]`."""

    @classmethod
    def for_target(cls, path: str | None, target: LanguageModel) -> Self:
        """Load the head at a path, or with `embedded:` an embedded one, for a target.

        Raises:
            CompositionError: there is no path, because none was trained for the target.
            ModelError: as of `load`.
        """
        kind = cls.kind
        if path is None:
            raise CompositionError(
                f"no {kind!r} drafter was trained for {target.name!r}; train one by truedraft train {kind} --model "
                f"{target.name}, look elsewhere by --drafters-dir DIR, or name one as {kind}:DIR"
            )
        folder = embedded_heads(path.removeprefix(_EMBEDDED)) if path.startswith(_EMBEDDED) else path
        return cls.load(folder).reading(target.shown_layers)

    def with_record(self, record: HeadRecord) -> Self:
        other = copy.copy(self)
        other.record = record
        return other

    def save(self, folder: Path | str, record: HeadRecord, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the head into a folder, in bfloat16, float16 or float32; replaces an earlier checkpoint there.

        Raises `ModelError` if writing fails.
        """
        path, target = Path(folder), {"name": record.target_name, "fingerprint": record.fingerprint}
        target |= {} if record.sample is None else {"sample": record.sample}
        about = {"kind": self.kind, "version": _VERSION, "target": target}
        about |= {"dtype": dtype_name(dtype), **asdict(self.config)}  # type: ignore[call-overload]
        weights = {name: _in(dtype, each.detach().cpu()).contiguous() for name, each in self.state_dict().items()}
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / _CONFIG).unlink(missing_ok=True)
            save_file(weights, path / _WEIGHTS)
            (path / _WEIGHTS).chmod(0o644)  # safetensors writes files that only their owner can read
            (path / self.facts_file).write_text(json.dumps(self._kept(record)) + "\n", encoding="utf-8")
            (path / _CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"cannot write the heads into {str(path)!r} ({error}); make room, or name another folder"
            ) from error

    def _kept(self, record: HeadRecord) -> dict[str, Any]:
        return dict(record.facts)

    @classmethod
    def _read(cls, kept: dict[str, Any]) -> tuple[Mapping[str, RankTree], Mapping[str, Any]]:
        return {}, kept

    def reading(self, layers: int) -> Self:
        """The head for a target with so many layers; sets the layers that it reads if its folder names none."""
        return self

    @classmethod
    def load_published(cls, path: Path, *, ids_in_d2t: bool = False) -> Self | None:
        """A head of this kind that another project published at a path; None if there is none.

        `ids_in_d2t`: read ids, not offsets, as in damaged folders. Raises `ModelError` for unsupported files.
        """
        module = KINDS[cls.kind].published.partition(":")[0] if cls.kind in KINDS else ""
        load = getattr(import_module(module), "load_published", None) if module else None
        return None if load is None else load(path, cls, ids_in_d2t=ids_in_d2t)

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """A head, also of other projects, in evaluation mode, on the CPU, in the dtype of its file.

        Raises:
            ModelNotFoundError: there is no such folder, or no head in it.
            ModelError: a file is damaged, does not fit the others, or holds a head of another kind.
        """
        path = user_path(folder, ModelNotFoundError)
        published = cls.load_published(path)
        if published is not None:
            return published
        if not path.is_dir():
            raise ModelNotFoundError(f"there is no folder {str(path)!r} with {cls.noun}; check the path")
        if not (path / _CONFIG).is_file():
            raise ModelNotFoundError(
                f"the folder {str(path)!r} has no {_CONFIG}, so it does not hold {cls.noun}; name one that "
                f"`truedraft train {cls.kind}` wrote"
            )
        about = _read_json(path / _CONFIG)
        cls._refuse_other_kinds(about, path)
        try:
            # Older folders lack newer fields, which have defaults.
            given = {
                each.name: about[each.name]
                for each in fields(cls.sizes)
                if each.name in about or each.default is MISSING
            }
            config = cls.sizes(**given)
            name, known = str(about["target"]["name"]), about["target"]["fingerprint"]
            fingerprint = None if known is None else str(known)  # published heads have none
            sample = about["target"].get("sample")
            dtype = DTYPES[about["dtype"]]
        except (KeyError, TypeError, OptionError) as error:
            raise ModelError(f"{str(path / _CONFIG)!r} is damaged ({error}); {_AGAIN}") from error
        weights = {name: _in(dtype, each) for name, each in tensors_in(path / _WEIGHTS, _AGAIN).items()}
        heads = cls.with_weights(config, weights, path / _WEIGHTS)
        kept = _read_json(path / cls.facts_file)
        try:
            heads.record = HeadRecord(
                name, fingerprint, *cls._read(kept), sample=None if sample is None else str(sample)
            )
        except (OptionError, TypeError) as error:
            raise ModelError(f"{str(path / cls.facts_file)!r} is damaged ({error}); {_AGAIN}") from error
        return heads

    @classmethod
    def _refuse_other_kinds(cls, about: dict[str, Any], path: Path) -> None:
        kind, version = about.get("kind"), about.get("version")
        others = {each.kind: each.noun for each in _kinds(Head) if each is not cls}  # type: ignore[type-abstract]
        if kind in others:
            raise ModelError(f"{str(path)!r} holds {others[kind]}, not {cls.noun}; use {kind}:{path}")
        if kind != cls.kind:
            found = kind_in(path)
            if found is not None and found in KINDS and (head := KINDS[found].head):
                raise ModelError(f"{str(path)!r} holds {dotted(head).noun}, not {cls.noun}; use {found}:{path}")
            raise ModelError(
                f"{str(path / _CONFIG)!r} is not of {cls.noun} (its kind is {kind!r}); name a folder with {cls.noun}"
            )
        if version != _VERSION:
            raise ModelError(
                f"{str(path / _CONFIG)!r} is of version {version!r}, and this truedraft reads version {_VERSION}; "
                "train the heads again, or install the truedraft that wrote them"
            )

    @classmethod
    def with_weights(
        cls, config: HeadConfig, weights: Mapping[str, Tensor], file: Path, names: Mapping[str, str] | None = None
    ) -> Self:
        """A head in evaluation mode with exactly the weights of a file; `names` maps its names to those here.

        Raises `ModelError` for weights of other sizes.
        """
        with torch.device("meta"):
            heads = cls(config)
        own = heads.state_dict()
        names = {name: name for name in own} if names is None else names
        missing, unknown = sorted(names.keys() - weights.keys()), sorted(weights.keys() - names.keys())
        if missing:
            raise ModelError(f"{str(file)!r} lacks {', '.join(missing)}, which heads of its sizes have; {_AGAIN}")
        if unknown:
            raise ModelError(
                f"{str(file)!r} holds {', '.join(unknown)}, unknown to heads of its sizes: they are of a form that is "
                "not read here, or the file is damaged"
            )
        for there, here in names.items():
            if weights[there].shape != own[here].shape:
                raise ModelError(
                    f"{there} in {str(file)!r} has the shape {list(weights[there].shape)}, and heads of its sizes have "
                    f"{list(own[here].shape)} there; {_AGAIN}"
                )
        numbers = {weights[there].dtype for there, here in names.items() if own[here].is_floating_point()}
        others = [
            weights[there].dtype == own[here].dtype for there, here in names.items() if own[here].dtype is torch.int64
        ]
        if len(numbers) != 1 or not next(iter(numbers)).is_floating_point or not all(others):
            raise ModelError(f"{str(file)!r} holds numbers of several kinds; {_AGAIN}")
        heads.load_state_dict({here: weights[there] for there, here in names.items()}, strict=True, assign=True)
        return heads.eval().requires_grad_(False)


class VectorHead(Head):
    """Reads one hidden state of the target, from which the last token was drawn, and the tokens after it."""

    @abstractmethod
    def unroll(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Input of the output layer at each position: `[reach, rows, exit_width]`.

        `hidden`, `[rows, width]`, are inputs of the target's LM head; `embedded`, `[reach, rows, width]`, are of the
        drawn tokens and those after: position k reads the first k + 1.
        """

    def place_logits(self, place: int, vectors: Tensor, lm_head: LmHead) -> Tensor:
        """Logits `[rows, vocab]`, from its output layer's input `[rows, exit_width]`."""
        output = self.outputs[place]
        return lm_head(vectors) if output is None else lm_head.finish(output(vectors))


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W and b initialized to 0, so that it starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


def _in(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight.to(dtype) if weight.is_floating_point() else weight


def _kinds(parent: type[Head]) -> Iterator[type[Head]]:
    for each in parent.__subclasses__():
        if hasattr(each, "kind"):
            yield each
        yield from _kinds(each)


def linears_of(blocks: nn.Sequential) -> list[nn.Linear]:
    """The linear layers of residual blocks."""
    return [block.linear for block in blocks if isinstance(block, ResidualBlock)]


def over_whole_vocabulary(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits `[rows, vocab_size]` from `[rows, guessed]` of `ids`, or of the first ids; -inf elsewhere."""
    if ids is None:
        return logits[:, :vocab_size]
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, ids, logits)


def scaled_embedding(embedded: Tensor) -> Tensor:
    """Embeddings `[rows, width]` scaled to a root mean square of 1, because their size differs by orders of magnitude.

    In float32 with a tiny epsilon: torch's 0.008 in bfloat16 is more than the mean of squares of many tables.
    """
    wide = embedded.float()
    return functional.rms_norm(wide, wide.shape[-1:], eps=_TINY).to(embedded.dtype)


def placed(weight: Tensor, bias: Tensor | None, target: LanguageModel) -> Product:
    """A copy of a linear layer in a target's dtype and on its device, packed if that is faster."""
    device, dtype = target.device, target.dtype
    weight = weight.detach().to(device, dtype, copy=True)
    offset = None if bias is None else bias.detach().to(device, dtype, copy=True)
    if is_fastest(device, dtype):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        state = {"weight": weight} if offset is None else {"weight": weight, "bias": offset}
        layer.load_state_dict(state, assign=True)
        product = native_linears([layer], 0, dtype).get(layer)
        if product is not None:
            return product
    if can_pack(device, dtype):
        return PackedLinear(weight, offset)
    return lambda x: functional.linear(x, weight, offset)


def tensors_in(file: Path, advice: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file or torch checkpoint by name; no code in it is run.

    Raises:
        ModelNotFoundError: it is missing.
        ModelError: it cannot be read; or it holds something else, with `advice`.
    """
    if not file.is_file():
        raise ModelNotFoundError(f"{str(file)!r} is missing; {_AGAIN}")
    try:
        if file.suffix == ".safetensors":
            state = {name: in_memory(each) for name, each in load_file(file).items()}
        else:
            state = torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # an invalid pickle, or one with code, raises many kinds of errors
        raise ModelError(f"cannot read {str(file)!r} as tensors ({first_line(error)}); {_AGAIN}") from error
    if not isinstance(state, dict) or not all(isinstance(weight, Tensor) for weight in state.values()):
        raise ModelError(f"{str(file)!r} is no dictionary of tensors; {advice}")
    return state


def published_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The weights' file in another project's folder, and its tensors; raises `ModelError` if unreadable."""
    file = next((folder / name for name in _PUBLISHED if (folder / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{str(folder)!r} has neither {' nor '.join(_PUBLISHED)}; fetch one of them")
    return file, tensors_in(file, FETCH_AGAIN)


@contextlib.contextmanager
def reading_sizes(config: Path) -> Iterator[None]:
    """Turn errors of reading another project's config.json into a `ModelError`."""
    try:
        yield
    except KeyError as error:
        raise ModelError(f"{str(config)!r} does not name {error.args[0]!r}; fetch it again") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OptionError) as error:
        raise ModelError(f"{str(config)!r} names what makes no head here ({error}); fetch it again") from error


def unnamed_target(what: str, target: str = "") -> str:
    """The note about another project's head."""
    named = f" ({target} by name)" if target else ""
    return f"{what} does not say which weights it was trained for{named}; it is used because its sizes fit"


def write_published(folder: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write `model.safetensors`, then `config.json`; raises `ModelError` if they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _CONFIG).unlink(missing_ok=True)
        kept = {name: each.detach().cpu().contiguous() for name, each in weights.items()}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
        (folder / _CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the head into {str(folder)!r} ({error}); make room, or name another folder"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{str(path)!r} is missing; {_AGAIN}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {str(path)!r} ({error}); {_AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{str(path)!r} does not hold a JSON object; {_AGAIN}")
    return content
