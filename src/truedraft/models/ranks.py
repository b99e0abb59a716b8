"""Processes of one machine that run one model together: how they connect, their messages, and their parts of weights.

Rank 0 starts the others, unless a launcher such as `torchrun` started all. They use Gloo, and NCCL, too, for parts on
GPUs. A process that dies closes its connections, so that waiting ones fail at once. Weights are cut by transformers'
plan for the family: `colwise` layers have a part of their outputs in each process, `rowwise` ones a part of their
inputs, with summed results (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import gcd
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from truedraft.errors import ModelError, OptionError, UnsupportedModelError

_dist: Any = distributed  # most of what is used here has no types
_HOST = "127.0.0.1"
_CONNECTING = timedelta(seconds=60)
_PATIENCE = timedelta(days=365)  # for the next request
_LOOK_S = 0.02
_NOTICED_S = 2.0  # from a closed connection to the end of its process
_BEGUN = "begun"
_OVER = "so the model answers no more; start it again"


class RankLostError(ModelError):
    """A process that ran a part of the model has ended."""


class Ranks:
    """The process group of one model, in one of its processes; `others` are those that this one started."""

    def __init__(self, rank: int, count: int, store: Any, others: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.rank, self.count, self.others = rank, count, others
        self._store = store
        self._failure: str | None = None
        self._words: Any = None  # Gloo's group
        self._numbers: Any = None  # the same, or NCCL's
        weakref.finalize(self, _end, others)

    @classmethod
    def start(cls, count: int, options: Mapping[str, Any]) -> Ranks:
        """Start processes that call `load_model` with the JSON values `options`, or join those of a launcher.

        Raises OptionError: a launcher started another number of them, or for a second model; ModelError: rank 0 is not
        found.
        """
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1:
            return cls._launched(count, launched)
        store = _dist.TCPStore(_HOST, 0, is_master=True, timeout=_PATIENCE, wait_for_workers=False)
        threads = max(1, torch.get_num_threads() // count)
        given = {"WORLD_SIZE": str(count), "MASTER_ADDR": _HOST, "MASTER_PORT": str(store.port)}
        given["OMP_NUM_THREADS"] = str(threads)
        code = (
            "import json, sys; from truedraft.models.loading import load_model as run; run(**json.loads(sys.argv[1]))"
        )
        others = [
            subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(dict(options))],
                env={**os.environ, **given, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the first process only, which ends the others
            )
            for rank in range(1, count)
        ]
        return cls(0, count, _dist.PrefixStore("0", store), others)

    @classmethod
    def _launched(cls, count: int, launched: int) -> Ranks:
        if launched != count:
            raise OptionError(
                f"needs {count} processes, and {launched} were launched; launch as many, or start one process, "
                "which starts the others",
                field="tensor_parallel",
            )
        rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosted = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = _dist.TCPStore(address, port, None, hosted, _CONNECTING, wait_for_workers=False)
        except RuntimeError as error:
            raise ModelError(f"found no rank 0 at {address}:{port}, as MASTER_ADDR and MASTER_PORT say") from error
        store.set_timeout(_PATIENCE)
        store = _dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        if rank == 0 and store.add(_BEGUN, 1) > 1:
            raise OptionError(
                "is for one model in processes that a launcher started; start one process, which starts the others",
                field="tensor_parallel",
            )
        return cls(rank, count, store)

    def join(self, device: torch.device) -> None:
        """Wait until all processes have read their parts, and connect; RankLostError if one has ended."""
        self._store.set(f"rank {self.rank}", "")
        while self.rank == 0 and not self._store.check([f"rank {rank}" for rank in range(self.count)]):
            self.check()
            time.sleep(_LOOK_S)
        gloo = _dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=_HOST)], _PATIENCE
        self._words = self._numbers = gloo(_dist.PrefixStore("words", self._store), self.rank, self.count, options)
        if device.type == "cuda":
            self._numbers = _dist.ProcessGroupNCCL(_dist.PrefixStore("nccl", self._store), self.rank, self.count)

    @property
    def failure(self) -> str | None:
        if self._failure is None:
            found = [(rank, process.poll()) for rank, process in enumerate(self.others, start=1)]
            if ended := [(rank, status) for rank, status in found if status is not None]:
                rank, status = max(ended, key=lambda each: bool(each[1]))  # a process that lost another one ends with 0
                how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                self._failure = f"rank {rank} of the {self.count} processes that run the model {how}, {_OVER}"
        return self._failure

    def check(self) -> None:
        if self.failure is not None:
            raise RankLostError(self.failure)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """All processes run the same code in this context, or the group fails; RankLostError if another has ended."""
        try:
            yield
        except BaseException as error:
            lost = isinstance(error, RankLostError)
            end = time.monotonic() + _NOTICED_S
            while lost and self.failure is None and time.monotonic() < end:
                time.sleep(_LOOK_S)
            self._failure = self.failure or (
                str(error) if lost else f"a forward of several processes broke off, {_OVER}"
            )
            self._words = self._numbers = None  # closed, so that the others end
            if lost:
                raise RankLostError(self._failure) from error
            raise

    def send(self, message: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        with _connected():
            self._words.broadcast(torch.tensor([len(data)]), 0).wait()
            self._words.broadcast(data, 0).wait()

    def receive(self) -> Any:
        """Wait for the next message of rank 0; raises `RankLostError` when it has ended."""
        length = torch.zeros(1, dtype=torch.int64)
        with _connected():
            self._words.broadcast(length, 0).wait()
            data = torch.zeros(int(length), dtype=torch.uint8)
            self._words.broadcast(data, 0).wait()
        return pickle.loads(data.numpy().tobytes())

    def gathered(self, part: Tensor) -> Tensor:
        """The parts of all ranks, `[count, *part.shape]`, in their order; raises `RankLostError` if one has ended."""
        part = part.contiguous()
        parts = part.new_empty(self.count, *part.shape)
        with _connected():
            self._numbers._allgather_base(parts.view(-1), part.view(-1)).wait()
        return parts

    def added(self, part: Tensor) -> Tensor:
        """The sum of `gathered` parts in order, in float32 or better, rounded once: libraries split sums by size."""
        first, *others = self.gathered(part)
        total = first if first.dtype == torch.float64 else first.float()
        for each in others:
            total += each
        return total.to(part.dtype)


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"another of the processes that run the model has ended, {_OVER}") from error


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


_OUTPUTS = {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"}
_INPUTS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_WHOLE_OUTPUTS = {"colwise_gather_output", "colwise_rep"}
_WHOLE_INPUTS = {"rowwise_split_input", "rowwise_rep"}
_SUMMED = _INPUTS | {"moe_tp_experts", "all_reduce"}
# Unsharded in every process: lookups are fast, and the other style sums gradients.
_UNSHARDED = {"embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj"}


def refuse_unsharded(config: Any, name: str, count: int) -> None:
    """Raise UnsupportedModelError for a model without a plan, OptionError for heads that `count` does not divide."""
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if config.is_encoder_decoder or not _INPUTS.intersection(plan.values()):
        raise UnsupportedModelError(
            f"transformers has no tensor parallel plan for the layers of {name!r} ({config.model_type}); leave "
            "--tensor-parallel out"
        )
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or keys % count:
        most = gcd(heads, keys)
        fitting = [str(each) for each in range(2, most + 1) if most % each == 0]
        raise OptionError(
            f"is {count}, and {name!r} has {heads} attention heads and {keys} key heads, which cannot be shared so; "
            + (f"take {' or '.join(fitting)}" if fitting else "leave it out"),
            field="tensor_parallel",
        )


def shard(model: PreTrainedModel, name: str, ranks: Ranks) -> Callable[[], None]:
    """Cut a whole model's weights down to this process's part, in memory; its config records the number of parts.

    Returns a function that makes its modules join their parts, for after packing, which its hooks would prevent. Raises
    UnsupportedModelError: the plan has an unsupported style, or a width cannot be cut into equal parts.
    """
    plan = model.tp_plan
    unknown = sorted(set(plan.values()) - _OUTPUTS - _SUMMED - _UNSHARDED)
    if unknown:
        raise UnsupportedModelError(
            f"the tensor parallel plan of {name!r} has the style {unknown[0]!r}, which is not run here; leave "
            "--tensor-parallel out"
        )
    joins: dict[str, str] = {}
    for path, module in model.named_modules():
        style = plan.get(_generic(path))
        if style in _SUMMED and not isinstance(module, nn.Linear):
            joins[path] = style
        for own, weight in list(module.named_parameters(recurse=False)):
            how = plan.get(_generic(f"{path}.{own}"), style)
            if how not in _INPUTS | _OUTPUTS:
                continue
            axis = weight.dim() - 1 if how in _INPUTS else max(weight.dim() - 2, 0)  # of [..., out, in] or [out]
            packed = 2 if how == "packed_colwise" else 1
            if how in _INPUTS and own == "bias":
                part = None if ranks.rank else weight.detach()  # added in one process only
            elif weight.shape[axis] % (packed * ranks.count) == 0:
                part = _part(weight.detach(), axis, packed, ranks)
            elif how in _WHOLE_OUTPUTS | _WHOLE_INPUTS:
                break  # not cut
            else:
                raise UnsupportedModelError(
                    f"{path} of {name!r} is {weight.shape[axis] // packed} wide, which {ranks.count} processes cannot "
                    "share; take another --tensor-parallel"
                )
            setattr(module, own, None if part is None else nn.Parameter(part, requires_grad=False))
            if isinstance(module, nn.Linear):
                joins[path] = how
                module.out_features, module.in_features = module.weight.shape
    model.cut_into = ranks.count

    def join() -> None:
        for path, style in joins.items():
            module = model.get_submodule(path)
            if style in _WHOLE_INPUTS:
                module.register_forward_pre_hook(lambda _, inputs: (_part(inputs[0], -1, 1, ranks), *inputs[1:]))
            if style in _SUMMED:
                module.register_forward_hook(lambda module, inputs, output: ranks.added(output))
            elif style in _WHOLE_OUTPUTS:
                module.register_forward_hook(
                    lambda module, inputs, output: torch.cat([*ranks.gathered(output)], dim=-1)
                )

    return join


def _generic(path: str) -> str:
    """A path in the form of plans: "model.layers.11.mlp.fc1" is "model.layers.*.mlp.fc1"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _part(whole: Tensor, axis: int, packed: int, ranks: Ranks) -> Tensor:
    """This process's part of a tensor: of each of `packed` concatenated tensors along the axis.

    Worked example: of `[a0 a1 b0 b1]`, two packed, the first of two processes has `[a0 b0]`.
    """
    axis %= whole.dim()
    pieces = whole.unflatten(axis, (packed, ranks.count, -1))
    return pieces.select(axis + 1, ranks.rank).flatten(axis, axis + 1).clone()
