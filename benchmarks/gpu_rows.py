"""The rows of `gpu.py`: a model padded to 7B, for what drafts bring, and Llama 3.1 8B's shape, for the target alone."""

from __future__ import annotations

import gc
import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common import heldout_ids
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.budget import Speculation
from truedraft.core.stats import StepRecord
from truedraft.core.tree import chain_shape
from truedraft.drafters import Eagle3
from truedraft.drafters.base import Drafter
from truedraft.drafters.specs import from_spec
from truedraft.engine.answer import Answer
from truedraft.engine.policy import Effort, measure_drafter, read_bandwidth
from truedraft.engine.ready import settle
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head
from truedraft.machine import dtype_name, wait_for
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend

Made = TypeVar("Made")
Found: TypeAlias = tuple[float, Mapping[str, Any]]
"""The value of a row, and under what conditions it was measured."""
_GIB = 1 << 30
_DRAFT_EFFORT = Effort(1.0, 3, 24)
_LATER = 4  # answers that a first one is held to
_COMPARED = (
    ("one request, greedy", None, 0.0, ">= 2.5"),
    ("one request at 0.8", None, 0.8, ">= 1.7"),
    ("8 requests, greedy", 0, 0.0, ">= 1.8"),
    ("32 requests, greedy", 1, 0.0, ">= 0.98"),
    ("128 requests, greedy", 2, 0.0, ">= 0.98"),
)
"""Name, which of `Sizes.batches` (None is one request after another), temperature, and what is to be reached."""


class Sizes(NamedTuple):
    """How large everything is: first for the padded model, then for the other one."""

    pad_to: str | None  # what the embedded target is padded to; None leaves it
    dtype: torch.dtype  # of all models
    cache_bytes: tuple[int, int]  # of keys and values, for the padded model and for the other
    read_bytes: int  # that memory reads are measured with
    tokens: int  # new ones of an answer
    prompts: int  # that are answered one by one
    batches: tuple[int, int, int]  # requests that are answered together: few, many, and very many
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    contexts: tuple[int, int, int, int]  # that steps are measured behind
    prompt: int  # tokens of each of many prompts
    long: int  # tokens of a long prompt
    answer: int  # new tokens of each
    together: tuple[int, int, int]  # requests that are answered together: many, more, and very many
    draft_vocab: int  # ids that the EAGLE-3 head guesses


FULL = Sizes(
    pad_to="7B", dtype=torch.bfloat16, cache_bytes=(16 * _GIB, 24 * _GIB), read_bytes=4 * _GIB,
    tokens=96, prompts=4, batches=(8, 32, 128),
    layers=32, width=4096, inner=14336, heads=32, kv_heads=8, vocab=128256,
    contexts=(512, 2048, 8192, 32768), prompt=512, long=8192, answer=64, together=(64, 128, 256), draft_vocab=32000,
)  # fmt: skip
TINY = Sizes(
    pad_to=None, dtype=torch.float32, cache_bytes=(_GIB // 4, _GIB // 4), read_bytes=1 << 22,
    tokens=6, prompts=1, batches=(2, 3, 4),
    layers=4, width=64, inner=96, heads=4, kv_heads=2, vocab=256,
    contexts=(16, 24, 48, 96), prompt=12, long=48, answer=4, together=(2, 3, 4), draft_vocab=64,
)  # fmt: skip


class Row(NamedTuple):
    name: str
    unit: str
    measure: Callable[[Any], Found]  # of its group
    bar: str | None = None


class Group(ABC):
    """Rows of one model, which is loaded when the first of them is measured."""

    ROWS: Sequence[Row]

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device

    @abstractmethod
    def load(self) -> LanguageModel: ...

    @property
    def about(self) -> Mapping[str, Any]:
        return {"dtype": dtype_name(self.sizes.dtype)}

    @cached_property
    def bandwidth(self) -> float:
        return read_bandwidth(self.device, size_bytes=self.sizes.read_bytes)

    @cached_property
    def target(self) -> LanguageModel:
        self.before = allocated(self.device)
        return self.load()

    @property
    def floor_s(self) -> float:
        """Seconds in which a step's weights are read: no plain step takes less."""
        return self.target.weight_bytes / self.bandwidth

    def close(self) -> None:
        for name in [name for name in vars(self) if name not in ("sizes", "device", "before")]:
            del self.__dict__[name]
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def floor(self) -> Found:
        return 1e3 * self.floor_s, {"weight_bytes": self.target.weight_bytes}

    def left(self) -> Found:
        """What stays allocated when everything is deleted. The last row of a group."""
        weight_bytes = self.target.weight_bytes
        loaded = allocated(self.device) - self.before
        self.close()
        about = {"of_gib": loaded / _GIB, "weight_bytes": weight_bytes}
        return (allocated(self.device) - self.before) / _GIB, about


class Padded(Group):
    """The embedded target at the cost of a 7B model: what drafts bring."""

    ROWS = (
        Row("memory reads", "TB/s", lambda group: (group.bandwidth / 1e12, {"bytes": group.sizes.read_bytes})),
        Row("7B: floor of a plain step", "ms", methodcaller("floor")),
        Row("7B: making ready", "s", methodcaller("getting_ready")),
        Row("7B: first answer once ready, over later ones", "x", methodcaller("first"), ">= 0.8"),
        Row("7B: plain, one request", "tokens/s", methodcaller("plain")),
        Row("7B: plain, one request, over the floor", "x", methodcaller("plain_over_floor"), ">= 0.80"),
        *(
            Row(f"7B: {system} over plain, {name}", "x", methodcaller("ratio", system, place, heat), bar)
            for name, place, heat, bar in _COMPARED
            for system in ("draft", "auto")
        ),
        *(
            Row(f"7B: making {name}", "ms", methodcaller("drafting", words), f"<= {bar}")
            for name, words, bar in (
                ("a draft of 4", "draft,num_speculative_tokens=4", 0.5),
                ("Medusa, 16 nodes", "medusa,nodes=16", 0.5),
                ("recurrent head, 16 nodes", "redrafter,nodes=16", 0.8),
            )
        ),
        Row("7B: memory beyond weights, 32 requests of 300 tokens", "GiB", methodcaller("memory")),
        Row("7B: memory left once engine and model are deleted", "GiB", methodcaller("left"), "<= 1"),
    )

    def load(self) -> LanguageModel:
        return load_model("embedded:target", device=self.device, dtype=self.sizes.dtype, pad_to=self.sizes.pad_to)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Held-out ones, each as often as it takes with fewer of its tokens."""
        texts, most = heldout_ids(self.target, 96), max(self.sizes.batches)
        return [texts[number % len(texts)][: 96 - number // len(texts)] for number in range(most)]

    def engine(self, drafter: Drafter | None, requests: int, controller: str | None = None) -> Engine:
        return Engine(
            self.target, drafter, controller=controller, max_batch=requests, entropy=1,
            max_cache_bytes=self.sizes.cache_bytes[0], prefix_cache_bytes=0,
        )  # fmt: skip

    @cached_property
    def ready(self) -> tuple[Engine, dict[str, Any]]:
        drafter = from_spec("auto", self.target)
        engine = self.engine(drafter, max(self.sizes.batches))
        began = time.perf_counter()
        engine.make_ready(256)
        seconds = time.perf_counter() - began
        recordings = (self.target.warmups + sum(each.warmups for each in drafter.members.values())) // 2
        for heat in (0.0, 0.8):  # as a server does
            answered(engine, [self.prompts[-1]], self.params(heat, 16))
        rates = [self.rate(engine, [self.prompts[0]], 0.0) for _ in range(1 + _LATER)]
        return engine, {"seconds": seconds, "recordings": recordings, "rates": rates}

    def params(self, heat: float, tokens: int | None = None) -> SamplingParams:
        return SamplingParams(tokens or self.sizes.tokens, temperature=heat, ignore_eos=True)

    def rate(
        self, engine: Engine, prompts: Sequence[list[int]], heat: float, only: Sequence[str] | None = None
    ) -> float:
        """New tokens a second, prompts included; of some drafters only, or of none."""
        speculation = None if only is None else Speculation(tuple(only))
        answers, seconds = answered(engine, prompts, self.params(heat), speculation)
        return sum(len(each.token_ids) for each in answers) / seconds

    def getting_ready(self) -> Found:
        _, how = self.ready
        about = {"recordings": how["recordings"], "drafter": "auto", "max_batch": max(self.sizes.batches)}
        return how["seconds"], about

    def first(self) -> Found:
        _, how = self.ready
        first, *later = how["rates"]
        return first / median(later), {"tokens_per_s": how["rates"], "drafter": "auto"}

    @cached_property
    def plain_rates(self) -> list[float]:
        engine, _ = self.ready
        return [self.rate(engine, [prompt], 0.0, ()) for prompt in self.prompts[: self.sizes.prompts]]

    def plain(self) -> Found:
        return median(self.plain_rates), {"tokens": self.sizes.tokens, "each": self.plain_rates}

    def plain_over_floor(self) -> Found:
        return median(self.plain_rates) * self.floor_s, {"floor_ms": 1e3 * self.floor_s}

    @cached_property
    def compared(self) -> dict[tuple[int, float], dict[str, float]]:
        """Tokens a second of each system, by number of requests and temperature, as far as they were measured."""
        return {}

    def ratio(self, system: str, place: int | None, heat: float) -> Found:
        requests = 1 if place is None else self.sizes.batches[place]
        if (requests, heat) not in self.compared:
            alone = [[each] for each in self.prompts[: self.sizes.prompts]]
            groups = alone if requests == 1 else [self.prompts[:requests]]
            spent = {"plain": 0.0, "draft": 0.0, "auto": 0.0}
            for prompts in groups:
                for name, only in (("plain", ()), ("draft", ("draft",)), ("auto", None)):
                    spent[name] += 1.0 / self.rate(self.ready[0], prompts, heat, only)
            self.compared[requests, heat] = {name: len(groups) / each for name, each in spent.items()}
        rates = self.compared[requests, heat]
        about = {"requests": requests, "temperature": heat, "tokens": self.sizes.tokens}
        return rates[system] / rates["plain"], about | {"tokens_per_s": rates}

    def drafting(self, words: str) -> Found:
        return _made_ms(from_spec(words, self.target), self.target)

    def memory(self) -> Found:
        engine, requests = self.engine(None, self.sizes.batches[1]), self.sizes.batches[1]
        tokens = self.sizes.tokens if self.device.type == "cpu" else 204
        answered(engine, self.prompts[:requests], self.params(0.0, tokens))
        taken = allocated(self.device) - self.before - self.target.weight_bytes
        return taken / _GIB, {"requests": requests, "max_cache_bytes": engine.max_cache_bytes}


class Llama8B(Group):
    """The shape of Llama 3.1 8B with random weights: what the target itself takes."""

    ROWS = (
        Row("8B: floor of a plain step", "ms", methodcaller("floor")),
        *(
            Row(f"8B: step behind {context:,} tokens", "ms", methodcaller("step", place))
            for place, context in enumerate(FULL.contexts)
        ),
        Row("8B: plain step behind 512 tokens, over the floor", "x", methodcaller("over_floor"), ">= 0.80"),
        Row("8B: step behind 32,768 tokens over one behind 512", "x", methodcaller("longest_over_first"), "<= 1.4"),
        Row("8B: reading 8,192 tokens", "tokens/s", methodcaller("reading"), ">= 25,000"),
        *(
            Row(f"8B: {count} prompts of {tokens}, 64 new tokens", "tokens/s", methodcaller("many", place, part), bar)
            for count, tokens, place, part, bar in (
                (64, 256, 0, 2, None),
                (64, 512, 0, 1, ">= 1,900"),
                (128, 512, 1, 1, None),
                (256, 512, 2, 1, ">= 2,400"),
            )
        ),
        *(
            Row(f"8B: decoding steps alone, {count} rows", "tokens/s", methodcaller("alone", place), bar)
            for count, place, bar in ((64, 0, ">= 6,500"), (256, 2, ">= 12,000"))
        ),
        Row("8B: 8,192 tokens behind 64 prompts of 512, until all are answered", "s", methodcaller("behind_many")),
        Row("8B: the same, allocated beyond weights and pages", "GiB", methodcaller("beyond"), "<= 1.4"),
        Row("8B: making an EAGLE-3 draft, 16 nodes", "ms", methodcaller("eagle"), "<= 1.0"),
        Row("8B: memory left once engine and model are deleted", "GiB", methodcaller("left"), "<= 1"),
    )

    def load(self) -> LanguageModel:
        sizes = self.sizes
        config = LlamaConfig(
            vocab_size=sizes.vocab, hidden_size=sizes.width, intermediate_size=sizes.inner,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
            max_position_embeddings=max(sizes.contexts) + 128, bos_token_id=None, eos_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, tie_word_embeddings=False,
        )  # fmt: skip
        module = made(lambda: LlamaForCausalLM(config), self.device, sizes.dtype)
        # Its weights can be had again, so no hash is taken of all of them.
        return HuggingFaceModel(module, None, "Llama 3.1 8B's shape", fastest_backend, lambda: module)

    @cached_property
    def engine(self) -> Engine:
        most = max(self.sizes.together)
        engine = Engine(
            self.target, max_batch=most, max_cache_bytes=self.sizes.cache_bytes[1], prefix_cache_bytes=0, entropy=1
        )
        engine.make_ready(2 * self.sizes.prompt)
        return engine

    def texts(self, count: int, tokens: int) -> list[list[int]]:
        drawn = torch.randint(self.sizes.vocab, (count, tokens), generator=torch.Generator().manual_seed(tokens))
        return drawn.tolist()

    @cached_property
    def steps_s(self) -> dict[int, float]:
        return {}

    @contextmanager
    def behind(self, context: int) -> Iterator[Callable[[], float]]:
        """What takes a plain step's forward behind a text of zeros, whatever these are worth, and gives its seconds."""
        cache = self.target.new_cache()
        try:
            cache.reserve(context)
            cache.commit(range(context))
            yield partial(self._step_s, cache, torch.zeros(1, dtype=torch.int64))
        finally:
            self.target.release_cache(cache)

    def seconds_behind(self, context: int) -> float:
        """The median of some."""
        if context not in self.steps_s:
            with self.behind(context) as step_s:
                settle(step_s, lambda: self.target.warmups)
                found, began = [], time.perf_counter()
                while len(found) < 5 or (len(found) < 40 and time.perf_counter() - began < 1.0):
                    found.append(step_s())
            self.steps_s[context] = median(found)
        return self.steps_s[context]

    def _step_s(self, cache: Any, token: torch.Tensor) -> float:
        wait_for(self.device)
        began = time.perf_counter()
        self.target.forward([Segment(cache, token, chain_shape(1), (0,))]).logits.argmax(dim=-1).tolist()
        seconds = time.perf_counter() - began
        cache.commit(())
        return seconds

    def step(self, place: int) -> Found:
        context = self.sizes.contexts[place]
        return 1e3 * self.seconds_behind(context), {"context": context}

    def over_floor(self) -> Found:
        return self.floor_s / self.seconds_behind(self.sizes.contexts[0]), {"floor_ms": 1e3 * self.floor_s}

    def longest_over_first(self) -> Found:
        first, *_, last = self.sizes.contexts
        return self.seconds_behind(last) / self.seconds_behind(first), {"contexts": [first, last]}

    def reading(self) -> Found:
        """Tokens a second until the first new token, the second time that so long a prompt comes."""
        tokens = self.sizes.long
        *_, prompt = prompts = self.texts(2, tokens)
        for each in prompts:
            _, seconds = answered(self.engine, [each], SamplingParams(1, ignore_eos=True))
        return len(prompt) / seconds, {"tokens": tokens, "seconds": seconds}

    def many(self, place: int, part: int) -> Found:
        """New tokens a second, prompts included, which are the usual ones or a part of them."""
        count, sizes = self.sizes.together[place], self.sizes
        prompt, params = sizes.prompt // part, SamplingParams(sizes.answer, ignore_eos=True)
        answers, seconds = answered(self.engine, self.texts(count, prompt), params)
        rate = sum(len(each.token_ids) for each in answers) / seconds
        return rate, {"requests": count, "prompt": prompt, "tokens": sizes.answer}

    def alone(self, place: int) -> Found:
        """Of steps in which all requests write; short prompts and long answers, so that there are some."""
        count, sizes, engine = self.sizes.together[place], self.sizes, self.engine
        prompt, answer = sizes.prompt // 4, sizes.answer + count // 2
        records: list[StepRecord] = []
        engine.listeners[:] = [records.append]
        try:
            answered(engine, self.texts(count, prompt), SamplingParams(answer, ignore_eos=True))
        finally:
            engine.listeners.clear()
        steps = [each.total_s for each in records if len(each.requests) == count and not each.prefill]
        about = {"requests": count, "prompt": prompt, "tokens": answer, "steps": len(steps)}
        return count / median(steps), about | {"ms": 1e3 * median(steps)}

    @cached_property
    def long_behind_many(self) -> tuple[float, int]:
        """Seconds until all are answered, and the most bytes that were allocated beyond weights and pages."""
        engine, sizes = self.engine, self.sizes
        prompts = [*self.texts(sizes.together[0], sizes.prompt), *self.texts(1, sizes.long)]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        _, seconds = answered(engine, prompts, SamplingParams(sizes.answer, ignore_eos=True))
        pool = self.target.pool
        pages = None if pool is None else pool.most_bytes  # reserved, whoever uses them
        taken = engine.cache_bytes if pages is None else pages
        return seconds, peak(self.device) - self.before - self.target.weight_bytes - taken

    def behind_many(self) -> Found:
        return self.long_behind_many[0], {"requests": 1 + self.sizes.together[0], "long": self.sizes.long}

    def beyond(self) -> Found:
        return self.long_behind_many[1] / _GIB, {"counted": "device" if self.device.type == "cuda" else "resident"}

    def eagle(self) -> Found:
        sizes = self.sizes
        config = Eagle3Config(
            sizes.width, sizes.vocab, (1, sizes.layers // 2, sizes.layers - 1), heads=sizes.heads,
            kv_heads=sizes.kv_heads, head=sizes.width // sizes.heads, inner=sizes.inner,
            draft_vocab=sizes.draft_vocab, reach=5,
        )  # fmt: skip
        head = made(lambda: Eagle3Head(config), self.device, sizes.dtype)
        if head.draft_ids is not None:
            head.draft_ids.copy_(torch.arange(sizes.draft_vocab))
        return _made_ms(Eagle3(head.requires_grad_(False), nodes=16), self.target)


GROUPS: tuple[type[Group], ...] = (Padded, Llama8B)


def _made_ms(drafter: Drafter, target: LanguageModel) -> Found:
    """Milliseconds of its largest greedy proposal for one request."""
    cost = measure_drafter(drafter, target, effort=_DRAFT_EFFORT)
    largest = cost.points[-1]
    return 1e3 * largest.seconds, {"drafter": drafter.name, "levels": largest.depth, "nodes": largest.nodes}


def made(make: Callable[[], Made], device: torch.device, dtype: torch.dtype) -> Made:
    """Something with weights, made where they are to lie and in their dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make()
    finally:
        torch.set_default_dtype(usual)


def answered(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, speculation: Speculation | None = None
) -> tuple[list[Answer], float]:
    """Answers to prompts that come together, and the seconds until the last.

    Raises:
        TruedraftError: one failed.
    """
    began = time.perf_counter()
    requests = [engine.submit(prompt, params, speculation=speculation) for prompt in prompts]
    try:
        while not all(request.closed for request in requests):
            engine.step()
        wait_for(engine.target.device)
        seconds = time.perf_counter() - began
    finally:
        for request in requests:
            engine.cancel(request)
    for request in requests:
        if request.error is not None:
            raise request.error
    return [answer for request in requests if (answer := request.pieces[-1].answer) is not None], seconds


def allocated(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak(device: torch.device) -> int:
    """Most of them so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
