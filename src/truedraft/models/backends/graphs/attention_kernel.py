"""Attention over pages of keys and values in Triton: single rows, trees of drafted tokens, and chunks of prompts.

A program reads the keys of one request once, for a tile of the request's rows and all query heads that share a key
head, with an online softmax in float32. Keys are split every `SPLIT` positions. Each split has its own maximum, sum and
weighted values, which are joined in the order of the splits, by a second kernel or by a program that processes all
splits: the same arithmetic in the same order.

So a row's result depends only on its own query and on the keys that it sees: blocks and splits begin at multiples of
their size, a block with no visible key changes nothing, and sums over keys are products with ones, in the order of the
matrix unit. Tiles of up to 16 rows run the same instructions for any number of rows. Tiles of 64 rows use wider
instructions on Hopper, which may round differently.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 256
"""Positions of a split: few enough that one request of some thousand tokens keeps all of a GPU's processors busy."""

_DECODING_ROWS = 32
"""Most rows times heads of a program for tiles of up to 16 rows: from 64 on, Hopper uses other instructions."""
_MOST_SPLIT_TILE = 16
_NARROW_BYTES = 256
"""Bytes of a key up to which large blocks fit into registers and shared memory."""
_MOST_PART_BYTES = 256 << 20
"""Most bytes of all parts of a call; above that, one program processes all splits."""
_JOINED_AT_ONCE: tl.constexpr = tl.constexpr(16)
"""Splits with loads in flight at the same time."""
_FAR: tl.constexpr = tl.constexpr(1 << 30)
STAGES = 5  # pages of two blocks ahead, keys and values of two, and the block being computed
FUSES = False
"""Whether a product and a sum may be rounded at once: compilers would do so in one kernel and not in the other."""
_OPTIONS = {"enable_fp_fusion": FUSES}
_LOG2_E = math.log2(math.e)


def paged_attention(
    query: Tensor,  # [rows, heads, width], contiguous; overwritten
    keys: Tensor,  # [pages, page, kv_heads, width], contiguous
    values: Tensor,
    table: Tensor,  # [requests, pages of a request], int32: pages in the order of positions
    tiles: Tensor,  # [tiles, 3], int32: request, first row and number of rows, up to `tile`; 0 rows for padding
    tile_end: Tensor,  # [tiles], int32: end of the positions that the tile's rows see; 0 for padding
    length: Tensor,  # [requests], int32: committed tokens
    until: Tensor,  # [rows], int32
    first: Tensor,  # [rows], int32
    path: Tensor,  # [rows, words], int64; no words where all requests are chains
    scaling: float,  # factor on products of queries and keys
    tile: int,  # most rows of a tile
    span: int,  # most positions of a request
) -> Tensor:
    """Attention of rows to the keys of their own request. It never waits for the device and can be recorded.

    A row sees positions `first <= j < until`, and of its request's uncommitted nodes, node n at position `length + n`,
    those with their bit set in `path`. Query head h reads key head `h // (heads / kv_heads)`. Keys and values outside
    the range that the rows of a tile see may be NaN; inside it, a value that is not finite makes all of the tile's rows
    NaN. Returns `[rows, heads * width]`, in the memory of `query`; rows of no tile keep their query.

    Worked example: with pages of 16, position 37 of a request with pages 5, 9, 3 is row 5 of page 3. A row with first
    37 and until 38 gets its value, and so does one with until 0 and the path 0b100 after 35 committed tokens.
    """
    (rows, heads, width), (_, page, kv_heads, _) = query.shape, keys.shape
    padded, words = triton.next_power_of_2(width), 2 * path.shape[1]
    block_m, warps = rows_and_warps(tile, heads // kv_heads, padded, query.dtype)
    blocks, splits = triton.cdiv(tile * heads // kv_heads, block_m), triton.cdiv(span, SPLIT)
    joins = splits == 1 or tile > _MOST_SPLIT_TILE or rows * heads * splits * padded * 4 > _MOST_PART_BYTES
    parts = query.new_empty((0,) if joins else (rows, heads, splits, width), dtype=torch.float32)
    sums, maxima = query.new_empty((2, *parts.shape[:3]), dtype=torch.float32)
    seen = (length, until, first, path.view(torch.int32) if words else until)
    sizes = {"heads": heads, "width": width, "padded": padded, "split_size": SPLIT, "words": words} | _OPTIONS
    _attend[blocks * kv_heads, len(tiles), 1 if joins else splits](
        query, keys, values, table, tiles, tile_end, *seen, parts, sums, maxima, table.shape[1], splits,
        scaling * _LOG2_E, kv_heads=kv_heads, page_size=page, block_m=block_m, joins=joins,
        block_n=keys_at_once(padded, query.dtype), num_warps=warps, num_stages=STAGES, **sizes,
    )  # fmt: skip
    if not joins:
        _join[len(tiles) * tile, heads](
            query, tiles, *seen, parts, sums, maxima, splits, tile_rows=tile, num_warps=1, **sizes,
        )  # fmt: skip
    return query.view(rows, heads * width)


def rows_and_warps(tile: int, group: int, padded: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows times heads of a program, and its warps."""
    most = max(16, triton.next_power_of_2(tile * group))
    if tile <= _MOST_SPLIT_TILE or padded * dtype.itemsize > _NARROW_BYTES:
        return min(most, _DECODING_ROWS), 4
    return (128, 8) if most >= 128 else (most, 4)


def keys_at_once(padded: int, dtype: torch.dtype) -> int:
    """Keys of a block: two blocks of keys and of values, one read ahead of the other, fit together with the rest."""
    return 64 if padded * dtype.itemsize <= _NARROW_BYTES else 32


@triton.jit
def _reach(first, until, length, path, row, valid, words: tl.constexpr):
    chain = valid & (first < until)
    low = tl.min(tl.where(chain, first, _FAR), 0)
    high = tl.max(tl.where(chain, until, 0), 0)
    if words > 0:
        bit = tl.arange(0, 32)
        nodes = 0
        for word in tl.static_range(words):
            path_word = tl.load(path + row.to(tl.int64) * words + word, mask=valid, other=0)
            any_of_it = tl.max((path_word[:, None] >> bit[None, :]) & 1, 0)
            nodes = tl.maximum(nodes, tl.max(tl.where(any_of_it == 1, word * 32 + bit + 1, 0), 0))
        low = tl.where(nodes > 0, tl.minimum(low, length), low)
        high = tl.where(nodes > 0, tl.maximum(high, length + nodes), high)
    return low, high


@triton.jit
def _rows_of(tile, block, block_m: tl.constexpr, group: tl.constexpr):
    """The request of a tile, and for `block_m` of its rows times heads: row, head in the group, and validity."""
    m = block * block_m + tl.arange(0, block_m)
    return tl.load(tile), tl.load(tile + 1) + m // group, m % group, m // group < tl.load(tile + 2)


@triton.jit
def _seen(position, end, first, until, committed, path, row, valid, words: tl.constexpr):
    """Mask of a block of positions that ends before `end`, for each row."""
    seen = (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])
    if words > 0:
        if end > committed:
            node = position - committed
            for word in tl.static_range(words):
                bits = tl.load(path + row.to(tl.int64) * words + word, mask=valid, other=0)
                on_path = (bits[:, None] >> (node & 31)[None, :]) & 1
                seen = seen | ((on_path == 1) & ((node >= 0) & (node // 32 == word))[None, :])
    return seen


@triton.jit
def _with_block(maximum, weight, mixed, scores, v, ones):
    above = tl.maximum(maximum, tl.max(scores, 1))
    finite = tl.where(above == float("-inf"), 0.0, above)
    old = tl.exp2(maximum - finite)[:, None]
    p = tl.exp2(scores - finite[:, None]).to(v.dtype)
    weight = tl.dot(p, ones, weight * old, input_precision="tf32x3")
    return above, weight, tl.dot(p, v, mixed * old, input_precision="tf32x3")


@triton.jit
def _with_part(maximum, weight, mixed, of_part, weight_of_part, part):
    both = tl.maximum(maximum, of_part)
    finite = tl.where(both == float("-inf"), 0.0, both)
    old, new = tl.exp2(maximum - finite)[:, None], tl.exp2(of_part - finite)[:, None]
    return both, tl.fma(weight, old, weight_of_part * new), tl.fma(mixed, old, part * new)


@triton.jit
def _nothing(rows: tl.constexpr, columns: tl.constexpr, padded: tl.constexpr):
    maximum = tl.full([rows], float("-inf"), tl.float32)
    return maximum, tl.zeros([rows, columns], tl.float32), tl.zeros([rows, padded], tl.float32)


@triton.jit
def _over(mixed, weight):
    return mixed / tl.where(weight == 0.0, 1.0, weight)


@triton.jit(
    do_not_specialize=["pages", "splits", "scale"],
    do_not_specialize_on_alignment=["table", "tiles", "tile_end", "length", "until", "first", "path"],
)
def _attend(
    query, keys, values, table, tiles, tile_end, length, until, first, path, parts, sums, maxima, pages, splits, scale,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, page_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, split_size: tl.constexpr, words: tl.constexpr, joins: tl.constexpr,
):  # fmt: skip
    """One tile, one key head, `block_m` of its rows times heads, and one split or all (`joins`).

    Without `joins` each split writes weighted values to `parts [rows, heads, splits, width]`, and to `sums` and `maxima
    [rows, heads, splits]` the sum of weights and the largest score, as an exponent of 2, which includes `scale`.
    `pages` is the number of columns of the table; `words` have 32 bits.
    """
    group: tl.constexpr = heads // kv_heads
    # The last rows of a prompt see most, so that the longest programs start first.
    number, split = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    # With one long request, most programs of the others are beyond their end and return at once.
    if split * split_size >= tl.load(tile_end + number):
        return
    kv_head, block = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    if block * block_m >= tl.load(tiles + 3 * number + 2) * group:
        return
    request, row, member, valid = _rows_of(tiles + 3 * number, block, block_m, group)
    row_first = tl.load(first + row, mask=valid, other=_FAR)
    row_until = tl.load(until + row, mask=valid, other=0)
    committed = tl.load(length + request)
    low, high = _reach(row_first, row_until, committed, path, row, valid, words)
    begin = tl.maximum(low // block_n * block_n, split * split_size)
    end = high if joins else tl.minimum(high, (split + 1) * split_size)
    if not joins:
        if begin >= end:
            return
    d = tl.arange(0, padded)
    head = row.to(tl.int64) * heads + kv_head * group + member  # of all rows
    q_at = query + head[:, None] * width + d[None, :]
    q_mask = valid[:, None] & (d < width)[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0)
    ones = tl.full([block_n, 16], 1.0, q.dtype)  # a product with it is a sum, the same in all columns
    maximum, weight, mixed = _nothing(block_m, 16, padded)
    whole_max, whole_weight, whole = maximum, weight, mixed
    for start in range(begin, end, block_n):
        if joins:
            if start % split_size == 0:
                whole_max, whole_weight, whole = _with_part(whole_max, whole_weight, whole, maximum, weight, mixed)
                maximum, weight, mixed = _nothing(block_m, 16, padded)
        position = start + tl.arange(0, block_n)
        held = (position >= low) & (position < high)
        page = tl.load(table + request * pages + position // page_size, mask=held, other=0)
        at = ((page.to(tl.int64) * page_size + position % page_size) * kv_heads + kv_head) * width
        mask = held[:, None] & (d < width)[None, :]
        k = tl.load(keys + at[:, None] + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        seen = _seen(position, start + block_n, row_first, row_until, committed, path, row, valid, words)
        v = tl.load(values + at[:, None] + d[None, :], mask=mask, other=0.0)
        maximum, weight, mixed = _with_block(maximum, weight, mixed, tl.where(seen, scores, float("-inf")), v, ones)
    if joins:
        _, whole_weight, whole = _with_part(whole_max, whole_weight, whole, maximum, weight, mixed)
        tl.store(q_at, _over(whole, tl.max(whole_weight, 1)[:, None]).to(q.dtype), mask=q_mask)
    else:
        place = head * splits + split
        tl.store(maxima + place, maximum, mask=valid)
        tl.store(sums + place, tl.max(weight, 1), mask=valid)
        tl.store(parts + place[:, None] * width + d[None, :], mixed, mask=q_mask)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tiles", "length", "until", "first", "path"])
def _join(
    out, tiles, length, until, first, path, parts, sums, maxima, splits,
    heads: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, tile_rows: tl.constexpr, split_size: tl.constexpr,
    words: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * (tl.program_id(0) // tile_rows)
    place = tl.program_id(0) % tile_rows
    if place >= tl.load(tile + 2):
        return
    request = tl.load(tile)
    row = tl.load(tile + 1) + place + tl.arange(0, 1)
    low, high = _reach(
        tl.load(first + row), tl.load(until + row), tl.load(length + request), path, row, row >= 0, words
    )
    d = tl.arange(0, padded)[None, :]
    inside = d < width
    head = row.to(tl.int64) * heads + tl.program_id(1)
    maximum, weight, mixed = _nothing(1, 1, padded)
    end = tl.minimum(tl.cdiv(high, split_size), splits)
    for start in range(low // split_size, end, _JOINED_AT_ONCE):
        for number in tl.static_range(_JOINED_AT_ONCE):
            split = start + number + tl.arange(0, 1)
            at = head * splits + split
            written = split < end
            of_part = tl.load(maxima + at, mask=written, other=float("-inf"))
            weight_of_part = tl.load(sums + at, mask=written, other=0.0)[:, None]
            part = tl.load(parts + at[:, None] * width + d, mask=inside & written[:, None], other=0.0)
            maximum, weight, mixed = _with_part(maximum, weight, mixed, of_part, weight_of_part, part)
    tl.store(out + head[:, None] * width + d, _over(mixed, weight).to(out.dtype.element_ty), mask=inside)
