"""Batch inference on Ray Data: a class for `map_batches`, and text generation for training on a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from truedraft.core.params import SamplingParams
from truedraft.drafters.specs import from_spec
from truedraft.engine import Answer, Engine
from truedraft.engine.prompts import Prompt
from truedraft.errors import DataError, PromptError, TrainingError, TruedraftError
from truedraft.models.loading import load_model
from truedraft.server.cluster import connected, nodes, ray_module

_OPTIONS = frozenset(each.name for each in dataclasses.fields(SamplingParams))
_BATCH = 64


class Predictor:
    """Answers rows of prompts: `dataset.map_batches(Predictor, fn_constructor_kwargs={"model": ...}, ...)`.

    Each worker loads the model once. A row keeps its columns and gets `answer` (text; "" without a tokenizer),
    `answer_ids`, `finish_reason` and `error`. A row that fails is kept, with the finish reason "error" and one sentence
    in `error`, which is "" otherwise. Columns with the name of an option of `SamplingParams` override `params`.

    Args:
        prompt: the column of prompts: texts, or token ids.
        chat: whether a text is formatted as one user message by the model's chat template.
        batch: maximum rows answered together.
        loading: further options of `load_model`, such as `dtype` and `device`.

    Raises:
        TruedraftError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        drafter: str = "auto",
        *,
        prompt: str = "prompt",
        chat: bool = False,
        params: Mapping[str, Any] | None = None,
        batch: int = _BATCH,
        **loading: Any,
    ) -> None:
        self._target = load_model(model, **loading)
        self._engine = Engine(self._target, from_spec(drafter, self._target), max_batch=batch)
        self._column, self._chat, self._params = prompt, chat, dict(params or {})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the answers to rows, which are columns of numpy; a `DataError` if the column of prompts is missing."""
        if self._column not in batch:
            raise DataError(f"there is no column {self._column!r} of prompts; there are {', '.join(sorted(batch))}")
        count, own = len(batch[self._column]), sorted(_OPTIONS & batch.keys() - {self._column})
        requests: dict[int, tuple[Prompt, SamplingParams]] = {}
        answers: dict[int, Answer | TruedraftError] = {}
        for row in range(count):
            try:
                params = self._params | {name: _plain(batch[name][row]) for name in own}
                requests[row] = self._prompt(batch[self._column][row]), SamplingParams(**params)
            except (TruedraftError, TypeError, ValueError) as error:
                answers[row] = error if isinstance(error, TruedraftError) else PromptError(str(error))
        if requests:
            prompts, options = zip(*requests.values(), strict=True)
            answers |= zip(requests, self._engine.generate(list(prompts), options), strict=True)
        return batch | _columns([answers[row] for row in range(count)])

    def _prompt(self, given: Any) -> Prompt:
        if not isinstance(given, str):
            return [int(each) for each in given]
        if not self._chat:
            return given
        if self._target.tokenizer is None:
            raise PromptError(f"chats need a tokenizer with a chat template, and {self._target.name!r} has none")
        return self._target.tokenizer.chat([{"role": "user", "content": given}])


def _plain(value: Any) -> Any:
    """A numpy value as a Python value, because options are checked by type."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _columns(answers: Sequence[Answer | TruedraftError]) -> dict[str, Any]:
    ids = np.empty(len(answers), dtype=object)
    columns: dict[str, list[str]] = {"answer": [], "finish_reason": [], "error": []}
    for row, each in enumerate(answers):
        ids[row] = np.array(each.token_ids if isinstance(each, Answer) else [], dtype=np.int64)
        columns["answer"].append(each.text or "" if isinstance(each, Answer) else "")
        columns["finish_reason"].append(each.finish_reason if isinstance(each, Answer) else "error")
        columns["error"].append((each.error or "") if isinstance(each, Answer) else str(each))
    return {"answer_ids": ids} | {name: np.array(values, dtype=object) for name, values in columns.items()}


def answers_on_ray(
    model: str, device: str, requests: Sequence[tuple[list[int], SamplingParams]]
) -> Iterator[tuple[list[int], bool]]:
    """Answer prompts on a cluster, in order: an `Elsewhere` for training; a `TrainingError` if one fails.

    A worker takes a GPU, or without GPUs all processors of a node; each must be able to load `model` by its name.
    """
    rows = [{"prompt": ids, **_differing(params)} for ids, params in requests]
    with connected():
        data = ray_module("ray.data")
        context = data.DataContext.get_current()
        context.execution_options.preserve_order, context.enable_progress_bars = True, False
        workers, needs = _workers(device)
        answered = data.from_items(rows).map_batches(
            Predictor,
            fn_constructor_kwargs={"model": model, "device": device},
            batch_size=_BATCH,
            compute=data.ActorPoolStrategy(size=workers),
            **needs,
        )
        for row in answered.iter_rows():
            if row["error"]:
                raise TrainingError(f"the target failed while it wrote text to train on: {row['error']}")
            yield row["answer_ids"].tolist(), row["finish_reason"] == "stop"


def _differing(params: SamplingParams) -> dict[str, Any]:
    named = {each.name: (getattr(params, each.name), each.default) for each in dataclasses.fields(params)}
    return {name: value for name, (value, usual) in named.items() if value != usual or name == "temperature"}


def _workers(device: str) -> tuple[int, dict[str, int]]:
    gpus = 0 if device == "cpu" else sum(int(each.get("GPU", 0)) for each in nodes())
    if gpus:
        return gpus, {"num_gpus": 1}
    cores = [int(each["CPU"]) for each in nodes() if each.get("CPU", 0) >= 1]
    return len(cores), {"num_cpus": min(cores)}
