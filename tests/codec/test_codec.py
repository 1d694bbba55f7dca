"""Rows come back bit for bit, at the cost that the flow says, also on a machine that rounds otherwise."""

import json
import lzma
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import nicest
from nicest.codec.codec import (
    HEAD,
    LZMA,
    MAX_RATIO,
    NARROWEST,
    Codec,
    PriorBins,
    bin_edges,
    bin_probabilities,
    compress_lzma,
    decompress_lzma,
)
from nicest.codec.container import START, CompressedFile
from nicest.codec.grid import Grid
from nicest.codec.stack import Corrupt, Stack
from nicest.flows import (
    LAWS,
    MLP,
    AffineSpline,
    Chain,
    ChannelMixing,
    ConvNet,
    Coupling,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    Logistic,
    Logit,
    Mixing,
    Partition,
    SinhArcsinh,
    Spline,
    Squeeze,
    TriangularAffine,
    Units,
    Within,
    channels,
    checkerboard,
    odd_even,
)

pytest.importorskip("constriction", reason="compression needs constriction: install nicest[codec]")


def shaken(flow: Flow, by: float = 0.3) -> Flow:
    """A flow in float64 with random numbers in its parameters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(by * torch.randn_like(parameter) / max(1, parameter.shape[-1]) ** 0.5)
    return flow.double().eval()


def coupled(law: str, dim: int = 6, levels: int = 5) -> Flow:
    couplings, partition = [], odd_even(dim)
    for _ in range(3):
        each = LAWS[law]()
        couplings.append(Coupling(partition, each, MLP(len(partition.i1), each.size * len(partition.i2), (8,))))
        partition = partition.swap()
    return shaken(Flow(Units.pixels(dim, levels), Chain(*couplings, DiagonalScaling(dim)), Logistic(dim)))


def conv() -> Flow:
    """All layers of an image model on 4 x 4 pixels."""
    law, shape = AffineSpline(bins=4), (4, 2, 2)
    board, halves = checkerboard(4, 4), channels(4, 2, 2)
    inner = Chain(Mixing(8), TriangularAffine(8), SinhArcsinh(8), Elementwise(Spline(), 8))
    chain = Chain(
        Logit(),
        Coupling(board, law, ConvNet((1, 4, 2), 1, law.size, width=4, blocks=1)),
        Squeeze((1, 4, 4)),
        ChannelMixing(shape),
        Coupling(halves, law, ConvNet((2, 2, 2), 2, law.size, width=4, blocks=1)),
        Coupling(halves.swap(), law, ConvNet((2, 2, 2), 2, law.size, width=4, blocks=1)),
        Within(Partition(range(8), 16), inner),
    )
    return shaken(Flow(Units.pixels(16, 17), chain, Gaussian(16, learned=True)))


def mixing() -> Flow:
    return shaken(Flow(Units.pixels(6, 5), Chain(Mixing(6), TriangularAffine(6)), Logistic(6)))


FLOWS = {law: coupled(law) for law in LAWS} | {"conv": conv(), "mixing": mixing()}
CODECS = {name: Codec(flow) for name, flow in FLOWS.items()}


@pytest.mark.parametrize("name", FLOWS)
def test_rows_come_back(name: str):
    codec = CODECS[name]
    rows = np.random.default_rng(0).integers(0, codec.levels, (40, codec.dim)).astype(np.uint8)
    assert np.array_equal(codec.decode(codec.encode(rows)), rows)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_rows_come_back(data: st.DataObject):
    flow = FLOWS[data.draw(st.sampled_from(["additive", "affine-spline"]))]
    count = data.draw(st.integers(0, 9))
    level = st.integers(0, flow.units.levels - 1)
    rows = np.array(data.draw(st.lists(level, min_size=count * flow.dim, max_size=count * flow.dim)), np.uint8)
    rows = rows.reshape(count, flow.dim)
    again = nicest.decompress(flow, nicest.compress(flow, rows, block=data.draw(st.integers(1, 10))))
    assert again.dtype == np.uint8
    assert np.array_equal(again, rows)


@pytest.mark.parametrize(("levels", "dtype"), [(2, np.uint8), (256, np.uint8), (65536, np.uint16)])
def test_levels_and_shapes_come_back(levels: int, dtype: type):
    flow = coupled("affine", levels=levels)
    rows = np.random.default_rng(0).integers(0, levels, (5, 2, 3)).astype(dtype)
    again = nicest.decompress(flow, nicest.compress(flow, rows))
    assert again.dtype == dtype
    assert np.array_equal(again, rows)


def cost_and_bits(codec: Codec, rows: np.ndarray) -> tuple[float, float]:
    """Bits that rows add to a stack, and -log2 p of them by the plain flow, at the noise that they take from it."""
    words = np.random.default_rng(0).integers(0, 1 << 32, 40_000, dtype=np.uint32)
    stack, same = Stack(words, fresh=True), Stack(words, fresh=True)
    before = stack.bits
    codec._push(rows, stack)
    level = torch.from_numpy(rows.astype(np.int64))
    i = codec.cells.edges[level] + same.pop(codec.cells.edges[level + 1] - codec.cells.edges[level])
    y = (i.double() + 0.5) * 2.0**-codec.cells.bits
    nats = codec.flow.log_density(y) + codec.flow.units.log_det(y)
    return stack.bits - before, -nats.sum().item() / math.log(2)


@pytest.mark.parametrize("name", ["additive", "affine", "affine-spline"])
def test_the_cost_is_the_log_likelihood(name: str):
    codec = CODECS[name]
    cost, bits = cost_and_bits(codec, np.random.default_rng(0).integers(0, codec.levels, (500, 6)).astype(np.uint8))
    assert cost / bits == pytest.approx(1, abs=0.003)


def test_a_trained_model_codes_at_its_bits_per_dim():
    run = nicest.open("digits-conv", dtype=torch.float64)
    cost, bits = cost_and_bits(Codec(run.flow), run.splits.test[:12])
    assert cost / bits == pytest.approx(1, abs=0.003)


def elsewhere(t: torch.Tensor, error: float) -> torch.Tensor:
    """Numbers as another machine computes them: off by this error, relative to 1 or to their size."""
    return t + 0.95 * error * t.abs().clamp_min(1.0) * (2 * torch.rand_like(t) - 1)


@pytest.mark.parametrize(("name", "careful"), [("affine", True), ("affine", False), ("mixing", True)])
def test_another_machine_decodes_it(name: str, careful: bool, monkeypatch: pytest.MonkeyPatch):
    """With errors far larger than those of real machines, so that many numbers lie near an edge: the rows that have
    one are stored as they are, and without that care another machine decodes nothing."""
    module, near, codec = "nicest.codec.grid", Grid._round, CODECS[name]
    errors = {"NETWORK_ERROR": 2.0**-20, "FUNCTION_ERROR": 2.0**-30}
    for key, error in errors.items():
        monkeypatch.setattr(f"{module}.{key}", error)
    torch.manual_seed(0)
    rows = np.random.default_rng(0).integers(0, codec.levels, (150, codec.dim)).astype(np.uint8)

    # parameters, of one dimension, are the same on every machine
    def off(grid: Grid, t: torch.Tensor, bits: int, error: float) -> torch.Tensor:
        return near(grid, t if grid.encoding or t.ndim < 2 else elsewhere(t, error), bits, error if careful else -1.0)

    if not careful:
        monkeypatch.setattr(codec, "decode", lambda block: rows)
    with monkeypatch.context() as patched:
        patched.setattr(Grid, "_round", off if not careful else near)
        block = codec.encode(rows)
    monkeypatch.setattr(Grid, "_round", off)
    stored = HEAD.unpack_from(block)[2]
    if careful:
        assert 0 < stored < 100
        assert np.array_equal(Codec.decode(codec, block), rows)
    else:
        with pytest.raises(nicest.NicestError, match="cannot be decoded"):
            Codec.decode(codec, block)


@pytest.mark.parametrize("prior", [Gaussian(1), Logistic(1)])
def test_the_bins_of_the_prior_are_the_same_on_every_machine(prior: nn.Module):
    """Against scipy's distributions, whose last digits differ from torch's; no bin is near the edge of rounding."""
    law = {"Gaussian": stats.norm, "Logistic": stats.logistic}[type(prior).__name__]
    share = np.diff(law.cdf(bin_edges().numpy()))
    exact = 2.0**24 * ((1 - 2.0**-10) * share + 2.0**-10 / len(share))
    counts = 2.0**24 * bin_probabilities(prior)
    assert np.array_equal(counts, exact.round())
    assert abs(np.abs(exact - exact.round()) - 0.5).min() > 1e-5


def test_the_bin_of_a_cell_is_that_of_its_edges():
    prior = PriorBins(Logistic(1), torch.device("cpu"))
    i = torch.cat([prior.edges[:-1], prior.edges[1:] - 1, torch.randint(*prior.limits, (1000,))])
    k = prior.bin_of[(i - prior.limits[0]) >> NARROWEST]
    assert torch.equal(k, torch.searchsorted(prior.edges, i, right=True) - 1)
    assert torch.equal(prior.edges[k] + prior.sizes[k], prior.edges[k + 1])


def test_a_block_that_does_not_decode_is_stored(monkeypatch: pytest.MonkeyPatch):
    codec, rows = CODECS["affine"], np.random.default_rng(0).integers(0, 5, (30, 6)).astype(np.uint8)

    def fails(self: Grid, *inputs: object, **options: object) -> None:
        raise Corrupt

    with monkeypatch.context() as patched:
        patched.setattr(Grid, "unbend", fails)
        block = codec.encode(rows)
    assert HEAD.unpack_from(block)[2] == 30
    assert np.array_equal(codec.decode(block), rows)


def test_rows_that_the_flow_cannot_code_are_stored():
    """A scale of e^9 takes all rows but those near 0 beyond the grid."""
    flow = Flow(Units.pixels(4, 16), Chain(DiagonalScaling(4)), Gaussian(4)).double()
    nn.init.constant_(flow.bijection[0].s, 9.0)
    rows = np.random.default_rng(0).integers(0, 16, (50, 4)).astype(np.uint8)
    codec = Codec(flow)
    block = codec.encode(rows)
    assert HEAD.unpack_from(block)[2] > 40
    assert np.array_equal(codec.decode(block), rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FLOWS)
def test_a_cpu_decodes_what_a_gpu_coded(name: str):
    codec, other = CODECS[name], Codec(FLOWS[name].cuda())
    FLOWS[name].cpu()
    assert other.digest == codec.digest
    rows = np.random.default_rng(0).integers(0, codec.levels, (40, codec.dim)).astype(np.uint8)
    assert np.array_equal(codec.decode(other.encode(rows)), rows)
    assert np.array_equal(other.decode(codec.encode(rows)), rows)


@pytest.mark.parametrize("data", [b"", b"a", b"ab" * 500, bytes(10_000_000), np.random.default_rng(0).bytes(3000)])
def test_what_is_stored_comes_back_and_is_never_far_smaller(data: bytes):
    packed = compress_lzma(data)
    assert decompress_lzma(packed, len(data)) == data
    assert len(packed) <= len(data) <= MAX_RATIO * len(packed)


def test_a_stored_bomb_is_refused():
    bomb = lzma.compress(bytes(10_000_000), lzma.FORMAT_RAW, filters=LZMA)
    with pytest.raises(Corrupt):
        decompress_lzma(bomb, 10_000_000)


class TestDamage:
    flow = FLOWS["additive"]
    rows = np.random.default_rng(0).integers(0, 5, (35, 6)).astype(np.uint8)
    data = nicest.compress(flow, rows, block=10)

    def test_a_flipped_bit_costs_one_block(self):
        packed = CompressedFile(self.data)
        offset, size, _ = packed.table[1]
        broken = bytearray(self.data)
        broken[offset + size // 2] ^= 4
        with pytest.raises(nicest.NicestError, match=r"1 of 4 blocks are damaged or cut off: 1 \(rows 10..19\)"):
            nicest.decompress(self.flow, bytes(broken))
        rest = nicest.decompress(self.flow, bytes(broken), partial=True)
        assert np.array_equal(rest, np.delete(self.rows, range(10, 20), 0))

    def test_a_cut_file_gives_what_is_there(self):
        cut = self.data[: CompressedFile(self.data).table[2][0] + 3]
        assert np.array_equal(nicest.decompress(self.flow, cut, partial=True), self.rows[:20])

    def test_any_cut_or_flip_is_told(self):
        def told(data: bytes) -> bool:
            try:
                packed = CompressedFile(data)
                list(packed.blocks(CODECS["additive"]))
            except nicest.NicestError:
                return True
            return bool(packed.lost)

        assert not told(self.data)
        generator = np.random.default_rng(0)
        for _ in range(4):
            broken = bytearray(self.data)
            broken[generator.integers(len(broken))] ^= 1 << generator.integers(8)
            assert told(bytes(broken))
            assert told(self.data[: generator.integers(len(self.data))])

    def test_a_wrong_block_with_a_right_checksum_is_told(self):
        """The stack must end as it began."""
        codec = CODECS["additive"]
        for at in range(HEAD.size, len(block := codec.encode(self.rows[:12])), 9):
            broken = bytearray(block)
            broken[at] ^= 16
            with pytest.raises(nicest.NicestError, match="cannot be decoded"):
                codec.decode(bytes(broken))

    def test_another_model_is_refused(self):
        other = coupled("additive")
        with torch.no_grad():
            next(other.parameters()).view(-1)[0] *= 1 + 1e-15
        with pytest.raises(nicest.NicestError, match="expected the model that compressed it"):
            nicest.decompress(other, self.data)

    def test_a_header_that_promises_too_much_is_refused(self):
        _, _, size, _ = START.unpack_from(self.data)
        header = self.data[START.size : START.size + size].replace(b'"rows": 35', b'"rows": 1000000000000')
        bomb = START.pack(b"\x89NICEST\n", 1, len(header), zlib.crc32(header)) + header
        with pytest.raises(nicest.NicestError, match="header is damaged or cut short"):
            nicest.decompress(self.flow, bomb)

    @pytest.mark.parametrize("key", ["model", "rows", "block", "shape"])
    @pytest.mark.parametrize("value", [None, -1, math.inf, {}])
    def test_a_header_of_nonsense_is_refused(self, key: str, value: object):
        _, _, size, _ = START.unpack_from(self.data)
        says = json.loads(self.data[START.size : START.size + size])
        del says[key]
        for text in (json.dumps(says).encode(), json.dumps(says | {key: value}).encode()):
            forged = START.pack(b"\x89NICEST\n", 1, len(text), zlib.crc32(text)) + text
            with pytest.raises(nicest.NicestError, match=r"header is damaged|expected the model|rows of 6 numbers"):
                nicest.decompress(self.flow, forged)

    @pytest.mark.parametrize(("data", "match"), [(b"", "an empty one"), (b"PK\3\4 and more", "something else")])
    def test_another_file_is_refused(self, data: bytes, match: str):
        with pytest.raises(nicest.NicestError, match=match):
            nicest.decompress(self.flow, data)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (np.zeros((3, 7), np.uint8), "rows of 6 numbers"),
        (np.zeros((3, 6)), "integers from 0 to 4"),
        (np.full((3, 6), 5, np.uint8), "from 5 to 5"),
        (np.full((3, 6), -1), "from -1 to -1"),
    ],
)
def test_other_rows_are_refused(rows: np.ndarray, match: str):
    with pytest.raises(nicest.NicestError, match=match):
        nicest.compress(FLOWS["additive"], rows)


def test_models_that_cannot_are_refused():
    with pytest.raises(nicest.NicestError, match="a single flow of images"):
        nicest.compress(Flow(Units.continuous(4), Chain(DiagonalScaling(4)), Gaussian(4)), np.zeros((2, 4), np.uint8))
    flow = Flow(Units.pixels(4), Chain(nicest.flows.ZCA(4)), Gaussian(4))
    with pytest.raises(nicest.NicestError, match=r"ZCA has no .*: train one with set model\.preprocess=none"):
        nicest.compress(flow, np.zeros((2, 4), np.uint8))


class TestWorkers:
    flow = FLOWS["additive"]
    rows = np.random.default_rng(0).integers(0, 5, (75, 6)).astype(np.uint8)

    def test_two_workers_write_and_read_the_same_bytes(self):
        data = nicest.compress(self.flow, self.rows, block=10)
        assert nicest.compress(self.flow, self.rows, block=10, jobs=2) == data
        assert np.array_equal(nicest.decompress(self.flow, data, jobs=2), self.rows)
        broken = bytearray(data)
        broken[CompressedFile(data).table[2][0] + 5] ^= 4
        with pytest.raises(nicest.NicestError, match=r"1 of 8 blocks are damaged or cut off: 2 \(rows 20..29\)"):
            nicest.decompress(self.flow, bytes(broken), jobs=2)
