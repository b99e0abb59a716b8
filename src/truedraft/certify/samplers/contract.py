"""The interface of a user's rejection sampler: a function of batched rows, with its possible arguments and results.

The function's parameter names select its arguments:

- `draft_tokens`: `[batch, k]`, int64;
- `draft_probs`: `[batch, k, vocab]`, float32, the distributions they were drawn from; one-hot where a token was not
  drawn;
- `target_probs`: `[batch, k + 1, vocab]`, float32; or `target_logits`: the same as logits, -inf where there is no mass;
- `uniforms`: `[batch, 2 k + 1]`, float64 in [0, 1): the numbers to use; or `generator`: a seeded `torch.Generator`. A
  function that takes neither draws from the global states of torch, numpy and `random`, which are seeded.

It returns the tokens to emit: `[batch, k + 1]`, integers, padded with -1; or a list of lists of 1 to k + 1 ids.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.certify.samplers.worlds import Rows
from truedraft.errors import OptionError, TruedraftError
from truedraft.measure.peers import load_function

_OFFSET = 3.0


_ARGUMENTS: Mapping[str, Callable[[Rows, int], Any]] = {
    "draft_tokens": lambda rows, seed: rows.draft_tokens.clone(),
    "draft_probs": lambda rows, seed: rows.draft_probs.clone(),
    "target_probs": lambda rows, seed: rows.target_probs.clone(),
    # Logits have an arbitrary offset in each row, so these are not logarithms of probabilities.
    "target_logits": lambda rows, seed: rows.target_probs.log() + _OFFSET,
    "uniforms": lambda rows, seed: torch.rand(
        len(rows),
        2 * rows.draft_tokens.shape[1] + 1,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    ),
    "generator": lambda rows, seed: torch.Generator().manual_seed(seed),
}
_OF_TARGET = ("target_probs", "target_logits")


@dataclass(frozen=True, slots=True)
class Sampler:
    """A user's rejection sampler; `name` is `module:function` as it was typed."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Sampler:
        """Read the parameters of a function; OptionError lists what a sampler may take."""
        if not callable(function):
            raise _refused(name, f"is a {type(function).__name__}; name a function")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise _refused(name, f"has no readable parameters ({error}); wrap it in a function of Python") from error
        names = []
        for each in parameters:
            if each.name in _ARGUMENTS and each.kind is not each.POSITIONAL_ONLY:
                names.append(each.name)
            elif each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                raise _refused(name, _unknown(each))
        if "draft_tokens" not in names or not set(_OF_TARGET) & set(names):
            raise _refused(name, "must take draft_tokens, and target_probs or target_logits")
        return cls(name, function, tuple(names))

    def emit(self, rows: Rows, seed: int) -> Tensor:
        """The tokens `[batch, k + 1]`, int64, padded with -1, that the sampler emits with the random numbers of a seed.

        Raises OptionError if it failed, or returned something else.
        """
        arguments = {name: _ARGUMENTS[name](rows, seed) for name in self.parameters}
        with _seeded(seed):
            try:
                given = self.function(**arguments)
            except TruedraftError as error:
                raise _refused(self.name, str(error)) from error
            except (Exception, SystemExit) as error:
                raise _refused(self.name, f"failed ({type(error).__name__}: {error}{_place(error)})") from error
        return self._checked(given, rows)

    def _checked(self, given: Any, rows: Rows) -> Tensor:
        batch, drafted = rows.draft_tokens.shape
        tokens = _tensor(given, batch, drafted + 1, self.name)
        vocab = rows.target_probs.shape[-1]
        if int(tokens.max()) >= vocab or int(tokens.min()) < -1:
            wrong = int(tokens.max()) if int(tokens.max()) >= vocab else int(tokens.min())
            raise _refused(self.name, f"emitted the id {wrong}; there are 0 to {vocab - 1}, and -1 to fill up")
        if bool((tokens[:, 0] < 0).any()):
            row = int((tokens[:, 0] < 0).nonzero()[0])
            raise _refused(self.name, f"emitted nothing for row {row}; each call gives at least one token")
        if bool(((tokens[:, :-1] < 0) & (tokens[:, 1:] >= 0)).any()):
            raise _refused(self.name, "gave a token behind a -1; -1 may only fill up the end of a row")
        return tokens


def load_sampler(spec: str) -> Sampler:
    """The sampler `MODULE:FUNCTION`; the module is importable, or in the working directory.

    Raises OptionError if there is none, or it is no sampler.
    """
    return Sampler.of(load_function("sampler", spec), spec)


def _unknown(parameter: inspect.Parameter) -> str:
    if parameter.name in _ARGUMENTS:
        return f"takes {parameter.name!r} by position alone; samplers are called by names"
    close = difflib.get_close_matches(parameter.name, _ARGUMENTS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"asks for {parameter.name!r}; {hint}what can be asked for: {', '.join(_ARGUMENTS)}"


def _refused(name: str, why: str) -> OptionError:
    return OptionError(f"{name!r}: {why}", field="sampler")


def _place(error: BaseException) -> str:
    """Where the user's code failed, because the error is shown without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is this file's
    return f", line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""


def _tensor(given: Any, batch: int, width: int, name: str) -> Tensor:
    shape = f"tokens [batch, k + 1] = [{batch}, {width}] or {batch} lists of 1 to {width} ids"
    if isinstance(given, list | tuple):
        given = _filled(given, batch, width, name, shape)
    if isinstance(given, np.ndarray):
        try:
            given = torch.from_numpy(np.ascontiguousarray(given))
        except (TypeError, ValueError) as error:  # an array of objects, or of foreign byte order
            raise _refused(name, f"gave back an array of {given.dtype} where ids are wanted; give {shape}") from error
    if not isinstance(given, Tensor):
        raise _refused(name, f"gave back a {type(given).__name__}; give {shape}")
    if tuple(given.shape) != (batch, width):
        raise _refused(name, f"gave back the shape {list(given.shape)}; give {shape}")
    if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        bad = "NaN" if bool(given.isnan().any()) else f"numbers of {given.dtype}"
        raise _refused(name, f"gave back {bad} where ids are wanted; give {shape}")
    return given.detach().to("cpu", torch.int64)


def _filled(rows: list[Any] | tuple[Any, ...], batch: int, width: int, name: str, shape: str) -> Tensor:
    if len(rows) != batch:
        raise _refused(name, f"gave back {len(rows)} rows for {batch}; give {shape}")
    filled = np.full((batch, width), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        try:
            ids = np.asarray(row.tolist() if isinstance(row, Tensor) else row)
        except (TypeError, ValueError, RuntimeError):  # the last two are torch's, for tensors in a list
            ids = np.asarray(None)
        if ids.ndim != 1 or len(ids) > width or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
            raise _refused(name, f"gave back {row!r} for row {number}; give {shape}")
        filled[number, : len(ids)] = ids
    return torch.from_numpy(filled)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(seed)  # torch.manual_seed checks every kind of device: a millisecond
            if torch.cuda.is_available():
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
