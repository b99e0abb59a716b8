"""Triton's attention over pages against the definition: `make test-kernels`, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.paged_requests import Asked, Paged, lay_out
from support.triton_kernels import DEVICE, why_not
from truedraft.core.tree import TreeShape, chain_shape

kernels = pytest.importorskip("truedraft.models.backends.graphs.attention_kernel")
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

# A weight is off by the error of its score: a sum of up to 256 products, off by some 10 times 2^-24 of scores up to 5.
# A key too many or too few among the few hundred here makes a difference of more than 1e-3.
BOUND = 1e-5

TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))
WIDE = TreeShape((-1, 0, 0, *range(1, 100)))  # two branches, dealt out in turns: paths lie in two words of 64 nodes


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Splits of 64 positions, for the interpreter takes milliseconds for each line of a kernel."""
    if DEVICE == "cpu":
        import triton.language as tl

        from truedraft.models.backends.graphs import attention_kernel

        monkeypatch.setattr(attention_kernel, "SPLIT", 64)
        monkeypatch.setattr(attention_kernel, "_JOINED_AT_ONCE", tl.constexpr(2))
    yield


def attention(paged: Paged) -> Tensor:
    return kernels.paged_attention(*paged.arguments())


def chains(*requests: tuple[int, int]) -> list[Asked]:
    """Requests by committed and new tokens."""
    return [Asked(length, chain_shape(new)) for length, new in requests]


CASES: dict[str, tuple[list[Asked], dict[str, int]]] = {
    "first tokens": (chains((0, 1), (1, 1)), {}),
    "one row each, of one to several pages": (chains((14, 1), (15, 1), (16, 1), (200, 1)), {"heads": 4, "kv_heads": 2}),
    "short chains": (chains((3, 4), (130, 2), (61, 3)), {"heads": 4, "kv_heads": 4, "tile": 4}),
    "several tiles of a request": (chains((70, 9), (20, 1)), {"heads": 2, "tile": 4}),
    "trees": ([Asked(30, TREE), Asked(131, TREE)], {"tile": 16}),
    "trees of which earlier forwards wrote some": (
        [Asked(62, TREE, 3), Asked(131, TREE, 6), Asked(0, TREE, 1)],
        {"tile": 4},
    ),
    "a tree beside a chain": ([Asked(63, TREE), *chains((140, 3))], {"tile": 16}),
    "a tree of two words": ([Asked(50, WIDE, 88), Asked(3, TREE, 2)], {"tile": 16}),
    "more words than needed": ([Asked(50, TREE), *chains((9, 2))], {"tile": 16, "words": 2}),
    "a window": (chains((200, 1), (3, 1)), {"window": 70}),
    "a window over trees": ([Asked(130, TREE), Asked(2, TREE, 4)], {"tile": 16, "window": 4}),
    "a window that leaves committed tokens out": (
        [Asked(40, TreeShape((-1, 0, 1, 2, 2, 3)), 2)],
        {"tile": 4, "window": 3},
    ),
    "parts of prompts": (chains((100, 70), (0, 30)), {"heads": 2, "tile": 64}),
    "a part of a prompt, decoding requests and a tree": (
        [*chains((0, 66), (90, 1)), Asked(35, TREE, 2)],
        {"heads": 4, "tile": 64},
    ),
    "a part of a prompt in a window": (chains((150, 66)), {"heads": 4, "tile": 64, "window": 40}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_as_defined(case: str) -> None:
    asked, shape = CASES[case]
    paged = lay_out(asked, **shape, device=DEVICE)
    torch.testing.assert_close(attention(paged).double(), paged.defined(), rtol=0, atol=BOUND)


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "tile"),
    [(64, 8, 1, 4), (80, 3, 3, 4), (96, 14, 2, 1), (128, 8, 2, 16), (256, 4, 1, 64), (128, 6, 1, 64)],
)
def test_widths_and_groups(width: int, heads: int, kv_heads: int, tile: int) -> None:
    """Groups of 1, 4, 7 and 8, and so on; widths that are powers of two, and others."""
    asked = [Asked(77, TREE, 3), *chains((20, 1))]
    paged = lay_out(asked, heads=heads, kv_heads=kv_heads, width=width, tile=tile, device=DEVICE)
    torch.testing.assert_close(attention(paged).double(), paged.defined(), rtol=0, atol=BOUND)


def test_padding_changes_nothing_and_stays_finite() -> None:
    asked = chains((70, 3), (5, 1))
    plain, padded = (lay_out(asked, tile=4, padding=padding, device=DEVICE) for padding in (0, 4))
    result = attention(padded)
    assert torch.equal(result[:4], attention(plain))
    assert torch.equal(result[4:], padded.query[4:].flatten(1))


@pytest.mark.parametrize("one", [*chains((200, 1), (140, 4)), Asked(131, TREE, 2)])
def test_a_row_alone_is_equal_bit_for_bit_to_one_in_a_batch_of_a_larger_span(one: Asked) -> None:
    beside = [Asked(30, TREE), *chains((280, 1), (0, 2))]
    alone = lay_out([one], tile=16, words=1, device=DEVICE)
    together = lay_out([one, *beside], tile=16, device=DEVICE)
    assert together.path.shape[1] == 1
    assert torch.equal(together.query[: one.count], alone.query)
    expected = attention(alone)
    assert torch.equal(attention(together)[: one.count], expected)
    assert torch.equal(attention(alone.with_span(1000)), expected)


def test_rows_are_equal_bit_for_bit_however_a_request_is_cut_into_tiles() -> None:
    """Here the number of rows times heads of a program is 16 for all."""
    asked = chains((130, 6))
    few, many = (lay_out(asked, heads=1, tile=tile, device=DEVICE) for tile in (4, 16))
    assert torch.equal(attention(few), attention(many))


def test_one_program_for_all_splits_is_equal_bit_for_bit_to_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from truedraft.models.backends.graphs import attention_kernel

    paged = lay_out([Asked(300, TREE), *chains((40, 2))], heads=4, tile=16, device=DEVICE)
    each = attention(paged)
    monkeypatch.setattr(attention_kernel, "_MOST_PART_BYTES", 0)
    assert torch.equal(attention(paged), each)


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter loads")
def test_programs_behind_the_end_of_their_request_load_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The more there are of these the longer another request is; those of a tile of padding are all so."""
    from triton.runtime.interpreter import InterpreterBuilder

    loads = 0
    load = InterpreterBuilder.create_masked_load

    def counted(*arguments: object) -> object:
        nonlocal loads
        loads += 1
        return load(*arguments)

    def count(paged: Paged) -> int:
        nonlocal loads
        loads = 0
        attention(paged)
        return loads

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    asked = [Asked(30, TREE), *chains((70, 1))]
    short, padded = (lay_out(asked, heads=4, kv_heads=2, tile=16, padding=each, device=DEVICE) for each in (0, 1))
    splits = 1000 // 64 + 1 - 2  # more than the two of before
    programs = 2 * 2  # for each: of two tiles and two key heads
    assert count(short.with_span(1000)) == count(short) + splits * programs
    of_joining = 16 * 4  # rows of the tile of padding, and heads
    assert count(padded) == count(short) + 2 * 2 + of_joining


@pytest.mark.parametrize("window", [1 << 20, 70])
def test_parts_that_nobody_wrote_are_not_read(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = lay_out([*chains((300, 1), (20, 3)), Asked(131, TREE, 2)], tile=4, window=window, device=DEVICE)
    expected = attention(paged.with_span(1000))

    new_empty = Tensor.new_empty

    def never_written(*given: object, **options: object) -> Tensor:
        made = new_empty(*given, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", never_written)
    assert torch.equal(attention(paged.with_span(1000)), expected)
    assert not expected.isnan().any()


def test_what_only_others_see_may_be_infinite() -> None:
    """Keys of another request, whatever they are, do no harm."""
    asked = chains((70, 1), (90, 1))
    paged = lay_out(asked, device=DEVICE)
    expected = attention(paged)
    others = paged.table[1].long()
    paged.values[others[others > 0]] = torch.inf
    assert torch.equal(attention(paged)[0], expected[0])
    assert not torch.equal(attention(paged)[1], expected[1])


def test_worked_example() -> None:
    def numbers(*each: int) -> Tensor:
        return torch.tensor(each, dtype=torch.int32, device=DEVICE)

    query, pages = torch.randn(2, 1, 64, device=DEVICE), torch.randn(2, 10, 16, 1, 64, device=DEVICE)
    table, tiles = numbers(5, 9, 3)[None], numbers(0, 0, 2)[None]
    path = torch.tensor([[0], [0b100]], device=DEVICE)
    mixed = kernels.paged_attention(
        query, *pages, table, tiles, numbers(38), numbers(35), numbers(38, 0), numbers(37, 0), path, 1.0, 4, 48
    )
    assert torch.equal(mixed, pages[1, 3, 5].expand(2, -1))


def test_no_tiles() -> None:
    paged = lay_out(chains((3, 1)), device=DEVICE)
    arguments = list(paged.arguments())
    arguments[4:6] = paged.tiles[:0], paged.tile_end[:0]
    assert torch.equal(kernels.paged_attention(*arguments), paged.query.flatten(1))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device: bfloat16 and its instructions")
def test_bfloat16_on_a_gpu_is_equal_bit_for_bit_in_tiles_for_decoding() -> None:
    asked = [Asked(700, TREE, 3), *chains((4000, 5))]
    tiles = [lay_out(asked, heads=32, kv_heads=8, width=128, tile=tile, device=DEVICE) for tile in (1, 4, 16, 64)]
    halved = [
        replace(each, query=each.query.bfloat16(), keys=each.keys.bfloat16(), values=each.values.bfloat16())
        for each in tiles
    ]
    *decoding, part_of_prompt = (attention(each) for each in halved)
    assert torch.equal(decoding[0], decoding[1])
    assert torch.equal(decoding[0], decoding[2])
    # Outputs of up to 1, from keys and values that were rounded to 8 bits, and rounded so themselves.
    for each in (decoding[0], part_of_prompt):
        torch.testing.assert_close(each.double(), tiles[0].defined(), rtol=0, atol=2**-7)
