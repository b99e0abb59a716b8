"""The native forward with weights of 8 and 4 bits: codes and products against a reference, and whose cache it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig
from transformers.pytorch_utils import Conv1D

from support.backends import as_function, library_for, native_backend
from support.codes import logits
from support.pairwise import pairwise
from support.tiny_models import VECTORS, build
from truedraft.core.tree import chain_shape
from truedraft.errors import OptionError, UnsupportedModelError
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.linear import NativeLmHead, native_linears
from truedraft.models.backends.native.memory import PER_SCALE, UNIT, Weights
from truedraft.models.backends.sequential import SequentialBackend
from truedraft.models.packed_linear import PackedLinear, can_pack

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)

SHAPES = [pytest.param(*shape) for shape in ((1, 16), (101, 48), (64, 32), (130, 80), (17, 288), (65, 1040))]
DTYPES = [torch.float32, torch.bfloat16]


def model_of(dtype: torch.dtype, experts: bool = False) -> HuggingFaceModel:
    config = MixtralConfig(**VECTORS, num_local_experts=5, num_experts_per_tok=2) if experts else LlamaConfig(**VECTORS)
    return HuggingFaceModel(build(config, seed=3, spread=0.15, dtype=dtype), None, "tiny", native_backend)


def weight_of(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """With groups of zeros, of one sign and of one value, weights too small to count, and large ones among small."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs)) * 0.05
    weight[0, :PER_SCALE] = 0.0
    weight[min(3, outputs - 1), 1] = 40.0
    weight[outputs - 1, inputs - 1] = -3.0
    for output, group in ((5, weight[5].abs()), (6, -weight[6].abs()), (7, -0.25), (8, 1e-39)) if outputs > 8 else ():
        weight[output] = group  # type: ignore[index]
    return weight.to(dtype)


def decoded(codes: Tensor, outputs: int, inputs: int, bits: int) -> Tensor:
    """The weights `[outputs, inputs]` that codes stand for, in float32; the layout is that of quantized.h."""
    units, groups = -(-outputs // UNIT), -(-inputs // PER_SCALE)
    rows = codes.view(units, groups, -1)
    scales = rows[..., : 2 * UNIT].contiguous().view(torch.float16).float()  # [units, groups, 64]
    packed = rows[..., 2 * UNIT :].view(units, groups, 4, bits, 16, 4).int()  # lines of 64 codes
    quads = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], dim=4).flatten(3, 4)
    signed = quads.view(units, groups, 4, 8, 16, 4) - (128 if bits == 8 else 8)
    whole = signed.permute(0, 2, 4, 1, 3, 5).reshape(units, UNIT, groups, PER_SCALE)
    return (whole * scales.permute(0, 2, 1)[..., None]).reshape(units * UNIT, -1)[:outputs, :inputs]


def quantized_head(weight: Tensor, bits: int, bias: Tensor | None = None) -> tuple[NativeLmHead, Tensor]:
    """A layer with quantised weights as a function of its own, and the weights that it multiplies by."""
    library = library_for(weight.dtype)
    weights = Weights(library)
    outputs, inputs = weight.shape
    linear = weights.quantized(weights.linear([weight], bias), bits)
    return as_function(library, weights, linear, weight.dtype), decoded(weights._kept[-1], outputs, inputs, bits)


@pytest.mark.parametrize(("dtype", "bits", "outputs", "inputs"), pairwise(DTYPES, [8, 4], SHAPES))
def test_codes_stand_for_weights_within_half_a_step(outputs: int, inputs: int, bits: int, dtype: torch.dtype) -> None:
    weight = weight_of(outputs, inputs, dtype)
    _, coded = quantized_head(weight, bits)
    exact = torch.nn.functional.pad(weight.float(), (0, -inputs % PER_SCALE)).view(outputs, -1, PER_SCALE)
    error = torch.nn.functional.pad(coded - weight.float(), (0, -inputs % PER_SCALE)).view(outputs, -1, PER_SCALE)
    largest = exact.abs().amax(-1)
    counts = largest > 1e-36  # of others no scale has an inverse
    assert not coded[weight.float().abs() < 1e-36].any(), "zeros stay zeros"
    if bits == 8:
        assert bool((error.abs().amax(-1) <= largest * 0.51 / 127)[counts].all())
    else:  # no worse, in squares, than by the plainest scale of 4 bits, whose codes are from -7 to 7
        step = (largest / 7).to(torch.float16).float()[..., None]
        plain = torch.where(step > 0, (exact / step.clamp_min(1e-30)).round().clamp(-8, 7) * step, 0.0)
        assert bool((error.square().sum(-1) <= (plain - exact).square().sum(-1) * 1.0001 + 1e-12).all())


@pytest.mark.parametrize(("dtype", "bits", "outputs", "inputs"), pairwise(DTYPES, [8, 4], SHAPES))
def test_products_equal_a_reference(outputs: int, inputs: int, bits: int, dtype: torch.dtype) -> None:
    """Inputs are quantised by the same groups; sums of products of codes are whole numbers, so they are exact."""
    head, coded = quantized_head(weight_of(outputs, inputs, dtype), bits)
    for rows in range(1, 10):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        x[0, :PER_SCALE] = 0.0
        x[-1, -1] = 300.0
        x = x.to(dtype)
        wide = torch.nn.functional.pad(x.float(), (0, -inputs % PER_SCALE)).view(rows, -1, PER_SCALE)
        most = wide.abs().amax(-1, keepdim=True)
        found = head.logits(x).double()
        assert found.shape == (rows, outputs)
        product = wide.double() * torch.where(most > 0, 127 / most, 0.0).double()
        step = (most / 127).double()
        read = (product.round() * step).view(rows, -1)[:, :inputs]
        expected = read @ coded.double().T
        # Inputs on the border of two codes may become either.
        border = ((product - product.floor() - 0.5).abs() < 1e-4) * step
        either = border.view(rows, -1)[:, :inputs] @ coded.double().abs().T
        sums = 2e-6 * (read.abs() @ coded.double().abs().T)  # of float32 over groups
        rounding = 2**-8 * (expected.abs() + either) if dtype is torch.bfloat16 else 0.0
        assert bool(((found - expected).abs() <= sums + rounding + either).all())


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    bits: int, dtype: torch.dtype, experts: bool
) -> None:
    library_for(dtype)
    model = model_of(dtype, experts).quantized(bits)
    cache, tokens = model.new_cache(), torch.randint(101, (60,), generator=torch.Generator().manual_seed(11))
    before, found = torch.get_num_threads(), []
    try:
        for threads, count in ((1, 60), (1, 1), (2, 7), (3, 60), (2, 13)):
            torch.set_num_threads(threads)
            found.append(model.forward([Segment(cache, tokens[:count], chain_shape(count), range(count))]).logits)
            cache.rollback(0)
    finally:
        torch.set_num_threads(before)
    assert all(each.equal(found[0][: len(each)]) for each in found)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_are_near_the_model_and_four_less_so(dtype: torch.dtype, experts: bool) -> None:
    library_for(dtype)
    model = model_of(dtype, experts)
    tokens = torch.randint(101, (50,), generator=torch.Generator().manual_seed(2))

    exact = logits(model, tokens)
    off = [float((logits(model.quantized(bits), tokens) - exact).std() / exact.std()) for bits in (8, 4)]
    assert 0.0 < off[0] < 0.1 < off[1] < 0.6, off


@pytest.mark.parametrize("bits", [8, 4])
def test_it_reads_what_the_model_committed_and_leaves_it_as_it_was(bits: int) -> None:
    model = model_of(torch.float32)
    draft = model.quantized(bits)
    assert (draft.name, draft.note, draft.pool) == (f"tiny in {bits} bits", None, model.pool) and model.name == "tiny"
    tokens = torch.randint(101, (90,), generator=torch.Generator().manual_seed(2))
    drafted, plain = model.new_cache(), model.new_cache()
    for cache in (drafted, plain):
        model.forward([Segment(cache, tokens[:33], chain_shape(33), ())])
        cache.commit(range(33))
    for start in range(33, 90, 3):
        for written in range(3):
            shape = chain_shape(written + 1)
            draft.forward([Segment(drafted, tokens[start + written][None], shape, (0,), written)])
        drafted.rollback(start)
        both = [
            model.forward([Segment(each, tokens[start : start + 3], chain_shape(3), range(3))]).logits
            for each in (drafted, plain)
        ]
        assert both[0].equal(both[1])
        drafted.commit(range(3))
        plain.commit(range(3))
    for ours, theirs in zip(drafted.entries(), plain.entries(), strict=True):
        assert ours[0].equal(theirs[0])
        assert ours[1].equal(theirs[1])


def test_other_forwards_are_refused_in_one_sentence() -> None:
    alone = HuggingFaceModel(build(LlamaConfig(**VECTORS), seed=3), None, "tiny", SequentialBackend)
    with pytest.raises(
        UnsupportedModelError, match=r"^tiny cannot draft for itself with weights of 8 bits \(.*another"
    ):
        alone.quantized(8)
    with pytest.raises(OptionError, match="bits must be 8 or 4, got 2"):
        alone.quantized(2)


def layer_of(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    layer.weight.data, layer.bias.data = weight_of(outputs, inputs, dtype), torch.arange(outputs).to(dtype)
    return layer


@pytest.mark.parametrize(("dtype", "bits", "made"), pairwise(DTYPES, [8, 4], ["plain", "packed", "turned"]))
def test_one_layer_alone_gives_what_the_products_give(made: str, bits: int, dtype: torch.dtype) -> None:
    """A layer of a model that runs by its own modules: plain, packed, or with its weight the other way round."""
    library_for(dtype)
    layer = layer_of(101, 48, dtype)
    source: nn.Module = layer
    if made == "packed":
        if not can_pack(torch.device("cpu"), dtype):
            pytest.skip("cannot pack")
        source = PackedLinear(layer.weight, layer.bias)
    elif made == "turned":
        source = Conv1D(101, 48).to(dtype)
        source.weight.data, source.bias.data = layer.weight.detach().T.contiguous(), layer.bias.detach()
    fewer = native_linears([source, nn.LayerNorm(48), nn.Linear(40, 8)], bits, dtype)
    assert list(fewer) == [source], "and others are left as they are"
    x = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.nn.functional.pad(torch.arange(101).to(dtype).float(), (0, 27))
    expected, without = (
        quantized_head(layer.weight.detach(), bits, each)[0].logits(x.flatten(0, 1)).view(2, 3, 101)
        for each in (bias, None)
    )
    torch.testing.assert_close(expected, without + bias[:101].to(dtype))
    assert fewer[source](x).equal(expected)
    assert fewer[source].plus(x, torch.ones_like(expected)).equal(expected + 1)
    assert fewer[source].weight_bytes == fewer[source]._weights._kept[-1].nbytes
