"""An unmodified Hugging Face causal language model as a `LanguageModel`."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.core.budget import Budget
from truedraft.core.inference import in_inference_mode
from truedraft.core.top_k import TopK
from truedraft.core.tree import chain_shape
from truedraft.errors import ModelError, OptionError, UnsupportedModelError
from truedraft.machine import free_memory, in_bytes, keep_rows_alike
from truedraft.models.backends.base import Backend, BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Choose, DrawnChain, ForwardOutput, HeadRun, LanguageModel, Segment
from truedraft.models.cache import CachePool, CodedBuffers
from truedraft.models.checkpoint import Checkpoint, can_be_read_from, fingerprint_of, is_whole, sample_of
from truedraft.models.lm_head import LmHead, LogitFinish, lm_head_width, refuse_other_logits
from truedraft.models.mapped import read_in
from truedraft.models.multimodal import Processor, placeholders_of, senses_of
from truedraft.models.padding import padding_note_of, padding_of
from truedraft.models.probe import rows_depend_on_their_number, some_ids
from truedraft.models.quantized import dequantize
from truedraft.models.sources import Sources
from truedraft.models.threads import ThreadChoice, torch_on_all_threads, torch_on_one_thread
from truedraft.text.tokenizer import Tokenizer

_ENDLESS = 2**20
# Rotary variants that change with the longest position of a forward, and the setting with the length where they do.
_CHANGING_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "max_target_positions")
_CHECKED_TOKENS = 4
_UNIT_ROWS = 64  # rows of an LM head that are read at once
_MOST_OF_FREE = 0.75  # of the free memory, for weights that are made in addition to the model's own
UP_TO_NEAR_TIES = "up to near ties"

_log = logging.getLogger("truedraft.models")


class HuggingFaceModel(LanguageModel):
    """Runs packed forwards through the modules of a model, or through a faster loop over its weights.

    The model, `module`, is switched to our attention, which needs a plan, and to evaluation without gradients, so run
    it through `forward` only. `backend` makes the backend that runs the forwards; `loading.fastest_backend` takes the
    fastest that fits. Without a `checkpoint` the fingerprint of a model that may be packed is computed at once. Raises
    UnsupportedModelError: the family cannot run packed; says why.
    """

    tokenizer: Tokenizer | Any  # None if there is none

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None,
        name: str,
        backend: BackendMaker = StockBackend,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        keep_rows_alike(model.device, model.dtype)
        self.module = model.eval().requires_grad_(False)
        self.name = name
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(f"{name} has no LM head; truedraft needs a causal language model")
        rows = int(head.weight.shape[0])
        self.vocab_size = min(rows, tokenizer.vocab_size) if tokenizer is not None else rows
        self.context_length, self._context_note = context_of(config)
        if model.config.is_encoder_decoder:
            self.sources = Sources.of(model, self.context_length)
            self.context_length += self.sources.source_limit  # the encoder's text and the decoder's
        self.eos_token_ids, self._ends_note = eos_ids(getattr(model, "generation_config", None), config, tokenizer)
        if self._ends_note is not None:
            _log.warning("%s: %s", name, self._ends_note)
        self.dtype = model.dtype
        self.parameters = sum(weight.numel() for weight in model.parameters())
        self.weight_bytes = _bytes_read(model)
        self.head_width = padding_of(model).get("width") or lm_head_width(head)
        self._finish = LogitFinish.of(model)
        self._finish_is_checked = False
        self._checkpoint = checkpoint
        self._fingerprint: str | None = None
        if checkpoint is None and backend is not StockBackend and can_be_read_from(model):
            self._fingerprint = fingerprint_of(model)
            read_in(model)  # packed weights are copies, and these would stay in memory
        self._make_backend = backend
        self._use(backend(model))
        self.device = model.device
        self.pool = self._backend.new_pool(self.context_length)
        self.adapters = self._backend.adapters
        self.input_names = self._backend.input_names
        self.placeholders = placeholders_of(model) if self.input_names else frozenset()
        self._lock = threading.Lock()
        self._threads = ThreadChoice() if self._backend.any_threads else None
        self._whole: HuggingFaceModel | None = None  # the model that this is a cheaper form of
        self._bits = 0  # of weights that are still to be made
        self._failures: dict[int, str] = {}  # by bits: why such weights could not be made; shared with twins

    def _use(self, backend: Backend) -> None:
        self._backend = backend
        self.weight_bytes = backend.weight_bytes or self.weight_bytes
        self.fast_paths, self.shown_layers = backend.fast_paths, backend.shown_layers

    @cached_property
    def equality(self) -> str:
        """How far greedy and seeded answers equal plain decoding, in words; determined by a few small forwards."""
        if self._whole is not None:
            return self._whole.equality
        vary = self._backend.rows_vary or rows_depend_on_their_number(self)
        return UP_TO_NEAR_TIES if vary else "bit for bit"

    @property
    def note(self) -> str | None:  # type: ignore[override]
        if self._whole is not None:
            return None  # that model's note says it all
        notes = [padding_note_of(self.module), self._backend.note, self._context_note, self._ends_note]
        if not self.input_names and (senses := senses_of(self.module)):
            notes.append(f"it reads text only, and is given no {' and no '.join(senses)}")
        if self.kv_dtype == "int8":
            notes.append("its keys and values are kept in 8 bits, and answers are those of plain decoding with these")
        if self.equality == UP_TO_NEAR_TIES:
            notes.append(
                f"equal {self.equality} (a row's last bits depend here on how many rows share its forward, so answers "
                "equal those of plain decoding but where two tokens nearly tie)"
            )
        return "; ".join(each for each in notes if each) or None

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            model, checkpoint = self.module, self._checkpoint
            if checkpoint is None:
                self._fingerprint = fingerprint_of(model)
            else:
                whole = model if can_be_read_from(model) else None
                self._fingerprint = checkpoint.kept("fingerprint", lambda: fingerprint_of(whole or checkpoint.read()))
        return self._fingerprint

    @property
    def sample(self) -> str | None:
        checkpoint = self._checkpoint
        if checkpoint is not None:
            return checkpoint.kept("sample", lambda: sample_of(checkpoint.read()) or "") or None
        return sample_of(self.module) if can_be_read_from(self.module) else None

    @cached_property
    def processor(self) -> Processor:
        config = self.module.config
        if not self.input_names or getattr(config, "vision_config", None) is None:
            return super().processor
        return Processor.load(config.name_or_path, self.name, getattr(config, "_commit_hash", None))

    @in_inference_mode
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        return self._first_forward(segments) if self._bits else self._forward(segments)

    def _first_forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        try:
            self.check_room()
        except ModelError as error:
            self._failures.setdefault(self._bits, str(error))
            raise
        try:
            output = self._forward(segments)
        except (MemoryError, RuntimeError, OSError) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            failure = self._failures.setdefault(self._bits, f"{self.name}: its weights could not be made ({said})")
            raise ModelError(failure) from error
        self._bits = 0
        return output

    def _forward(self, segments: Sequence[Segment], layers: Sequence[int] = ()) -> ForwardOutput:
        with self._lock:
            if self._backend.own_threads:
                output = self._backend.forward(segments, self.device, layers)
            else:
                rows = sum(len(segment.tokens) for segment in segments)
                with torch_on_all_threads():
                    if self._threads is None or layers:
                        output = self._backend.forward(segments, self.device, layers)
                    else:
                        output = self._threads.run(rows, lambda: self._backend.forward(segments, self.device))
        if output.logits.shape[1] == self.vocab_size:
            return output
        return ForwardOutput(output.logits[:, : self.vocab_size], output.hidden, output.layers)

    @torch.inference_mode()
    def forward_showing(self, segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        return self._forward(segments, layers)

    @property
    def records_chains(self) -> bool:  # type: ignore[override]
        return self._backend.records_chains

    @in_inference_mode
    def forward_chains(
        self, segments: Sequence[Segment], levels: int, choose: Choose, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        with self._lock:
            return self._backend.forward_chains(segments, levels, choose, numbers, self.vocab_size)

    @property
    def draws_chains(self) -> bool:  # type: ignore[override]
        return self._backend.draws_chains and not self._bits  # the first forward makes weights of other bits

    @in_inference_mode
    def draft_chain(self, segment: Segment, budget: Budget, numbers: Sequence[Sequence[float]]) -> DrawnChain:
        whole = self._whole or self
        with self._lock:
            return self._backend.draft_chain(segment, budget, numbers, self.vocab_size, whole.vocab_size)

    def shallow(self, layers: int) -> AbstractContextManager[None]:
        return self._backend.shallow(layers)

    def quantize(self, bits: int) -> None:
        """Quantise the linear weights, see `Backend.quantize`, and free the old ones.

        Name and fingerprint stay, so drafters trained for it still fit.
        """
        try:
            self._backend.quantize(bits)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self.name} cannot be given weights of {bits} bits: {error}") from error
        self._use(self._backend)

    def quantize_cache(self) -> None:
        """Keep the keys and values of all new caches as codes of 8 bits; UnsupportedModelError if it cannot."""
        if not self._backend.reads_codes:
            raise UnsupportedModelError(
                f"{self.name} cannot keep keys and values in 8 bits: only forwards that run packed on a CPU, in layers "
                "that carry no states, read these; leave --kv-dtype out"
            )
        self.pool = CachePool(self.context_length, storage=partial(CodedBuffers, self.dtype))
        self.kv_dtype = "int8"

    def quantized(self, bits: int) -> HuggingFaceModel:
        if bits not in (8, 4):
            raise OptionError(f"bits must be 8 or 4, got {bits}")
        try:
            backend = self._backend.quantized(bits)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{self.name} cannot draft for itself with weights of {bits} bits ({error}); use another drafter"
            ) from error
        twin = copy.copy(self)  # the lock and the pool of caches are shared
        twin.name, twin._whole, twin._bits = f"{self.name} in {bits} bits", self, bits
        twin._use(backend)
        twin._threads = None if self._threads is None else ThreadChoice()  # its forwards take other times
        return twin

    def narrowed(self, ids: Tensor) -> HuggingFaceModel:
        twin = copy.copy(self)  # the lock and the pool of caches are shared
        twin._whole, twin.vocab_size = self, len(ids)
        twin._backend = self._backend.narrowed(ids)
        return twin

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return self._failures.get(self._bits) if self._bits else self._backend.failure

    @property
    def warmups(self) -> int:  # type: ignore[override]
        return self._backend.warmups

    def check_room(self) -> None:
        super().check_room()
        free = free_memory(self.device) if self._bits else None
        if free is not None and self.weight_bytes > _MOST_OF_FREE * free:
            raise ModelError(
                f"{self.name} takes {in_bytes(self.weight_bytes)} of memory in addition to the model's own weights, "
                f"and {in_bytes(free)} are free, of which a quarter must stay so; free some, or use another drafter"
            )

    def whole_module(self) -> PreTrainedModel:
        """A float32 copy on the CPU, run by transformers; UnsupportedModelError if its weights cannot be read again."""
        module = self.module
        cut = getattr(module, "cut_into", 1) > 1  # over processes
        if cut or padding_of(module) or not (self._checkpoint or is_whole(module)):
            raise UnsupportedModelError(
                f"the weights of {self.name} were padded, packed or shared out to processes; load it without these"
            )
        read = module if self._checkpoint is None else self._checkpoint.read()
        if self._checkpoint is not None:
            dequantize(read)
        with torch.random.fork_rng(devices=[]):  # random weights that are overwritten
            made = type(read)(copy.deepcopy(read.config))
        made.load_state_dict(read.state_dict())
        made.generation_config = read.generation_config
        made.set_attn_implementation("sdpa" if made._supports_sdpa else "eager")
        return made.eval().requires_grad_(False)

    def with_weights(self, model: PreTrainedModel) -> HuggingFaceModel:
        """This model with the weights of `model`, which is taken over, packed or quantised in the same way.

        Name, fingerprint and caches stay. `model` comes from `whole_module` and has this one's dtype.
        """
        twin = copy.copy(self)
        twin.module, twin._finish_is_checked = model.to(self.device).eval().requires_grad_(False), False
        backend = self._make_backend(twin.module)
        if self._backend.bits:
            backend.quantize(8 if self._backend.bits > 4 else 4)
        twin._use(backend)
        return twin

    def take_weights(self, twin: HuggingFaceModel) -> None:
        """Use a twin's weights (`with_weights`) from the next forward on; earlier keys and values are not theirs."""
        with self._lock:
            for name in ("module", "_backend", "_finish_is_checked", "weight_bytes", "fast_paths"):
                setattr(self, name, getattr(twin, name))

    def stepping(self) -> AbstractContextManager[None]:
        return torch_on_one_thread() if self._backend.own_threads else nullcontext()

    @torch.inference_mode()
    def unembed(self, vectors: Tensor) -> Tensor:
        self._check_finish()
        return self._unembed(vectors)

    def lm_head(self) -> LmHead:
        self._check_finish()
        with torch.inference_mode(), self._lock:  # products with unit vectors are the weights, however they are stored
            unit = torch.eye(self.head_width, dtype=self.dtype, device=self.device)
            bias = self._backend.unembed(torch.zeros_like(unit[:4]))[0, : self.vocab_size].clone()
            rows = [self._backend.unembed(some)[:, : self.vocab_size] - bias for some in unit.split(_UNIT_ROWS)]
        own_bias = bias.cpu().clone() if bool(bias.any()) else None
        weight = torch.cat(rows).T.contiguous().cpu()
        try:
            table = self.embed(torch.arange(self.vocab_size, device=self.device)).cpu()
        except UnsupportedModelError:  # then no head reads it
            table = weight
        table = weight if torch.equal(table, weight) else table
        return LmHead(weight, own_bias, self._finish, None if table is weight else table.clone())

    @torch.inference_mode()
    def likeliest(self, vectors: Tensor, count: int) -> TopK:
        if self._finish.cap is not None:  # backends support a factor only
            return TopK.of(self.unembed(vectors), count)
        self._check_finish()
        with self._lock:
            return self._backend.likeliest(vectors, count, self.vocab_size, self._finish.factor)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]]) -> HeadRun | None:
        self._check_finish()
        if self._finish.cap is not None:
            return None
        heads = self._backend.shared_heads(blocks, self.vocab_size, self._finish.factor)
        if heads is None:
            return None

        def run(hidden: Tensor, depth: int, ranks: int) -> TopK:
            with self._lock:
                return heads(hidden, depth, ranks)

        return run

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        table = self.module.get_input_embeddings().weight
        if table.shape[1] < self.head_width:
            raise UnsupportedModelError(
                f"{self.name} embeds ids in {table.shape[1]} numbers, and heads read {self.head_width}; use heads that "
                "do not read the token"
            )
        return self._backend.embed(tokens, table)[:, : self.head_width]

    def finish_logits(self, logits: Tensor) -> Tensor:
        return self._finish(logits)

    def _unembed(self, vectors: Tensor) -> Tensor:
        with self._lock:
            logits = self._backend.unembed(vectors)
        return self._finish(logits[:, : self.vocab_size])

    def _check_finish(self) -> None:
        if self._finish_is_checked:
            return
        ids = some_ids(_CHECKED_TOKENS, self.vocab_size, self.device)
        with self.trying() as cache:
            output = self.forward([Segment(cache, ids, chain_shape(_CHECKED_TOKENS), range(_CHECKED_TOKENS))])
        refuse_other_logits(self._unembed(output.hidden[:, : self.head_width]), output.logits, self.name)
        self._finish_is_checked = True


def _bytes_read(model: PreTrainedModel) -> int:
    """Bytes of the weights, without an embedding that is not also the LM head: a forward reads few rows of it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    read = {id(weight): weight.nbytes for weight in model.parameters()}
    if embedding.weight is not head.weight:
        read.pop(id(embedding.weight), None)
    return sum(read.values())


def eos_ids(generation: Any, config: Any, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], str | None]:
    """Ids that end an answer, and a warning if generation would use fewer of them.

    They are those of the generation config, else of the text config, and in addition the tokenizer's own and the
    end-of-message id of its chat template: without these an answer would continue with further messages.
    """
    given = next(
        (each for holder in (generation, config) if (each := getattr(holder, "eos_token_id", None)) is not None), ()
    )
    known = (given,) if isinstance(given, int) else tuple(given)
    if tokenizer is None:
        return known, None
    turn = tokenizer.turn_end()
    ids = tuple(dict.fromkeys((*known, *tokenizer.eos_token_ids, *([] if turn is None else [turn]))))
    more = [token for token in ids if token not in known]
    if not known or not more:
        return ids, None
    named = ", ".join(repr(tokenizer.token_text(token)) for token in more)
    return ids, (
        f"answers end at {named} too: its tokenizer or chat template ends them so, though its generation configuration "
        "does not"
    )


def context_of(config: Any) -> tuple[int, str | None]:
    """Most tokens of a request, and a note if these are fewer than the model itself could read."""
    whole = next((given for name in _CONTEXT_NAMES if (given := getattr(config, name, None))), _ENDLESS)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    groups = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    least = int(whole)
    for group in groups:
        limit = _CHANGING_ROPE.get(str(group.get("rope_type", group.get("type"))))
        if limit is not None:
            least = min(least, int(group.get(limit) or getattr(config, limit, None) or whole))
    if least == whole:
        return least, None
    return least, (
        f"reads at most {least} tokens of its {whole}: after these its rotary positions change for the whole text, "
        "and with them what was read before"
    )
