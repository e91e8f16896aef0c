"""The verifier against kernels that are right and kernels that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.generator.build import build
from tilewright.generator.errors import LaunchFailed
from tilewright.generator.problem import MaskClass, Problem
from tilewright.generator.space import default_variant
from tilewright.generator.variant import Kernel, VariantSpec, kernel_of
from tilewright.runtime import masks
from tilewright.runtime.canonical import canonical
from tilewright.runtime.launch import LoadedKernel
from tilewright.runtime.plans import MaskPlan, build_plan
from tilewright.tuner.expected import expect, sample_rows
from tilewright.tuner.verify import CaseBook, verify, verify_call
from tilewright.tuner.worker_process import module_name

CPU = torch.device("cpu")
SCAN = VariantSpec("by_pytorch", "scan", 64, 64)


class ByPyTorch:
    """A right kernel: attention in float32 over the plan's dense mask, written to the outputs it is given."""

    def __init__(self, dtype: str) -> None:
        self.kernel = Kernel("attention_forward", dtype, 32, (), SCAN, "cpu")

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: MaskPlan,
        scale: float,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert out is not None
        assert lse is not None
        active = self.active(plan)
        scores = self.scores(query, key, scale).masked_fill(~active, -torch.inf)
        sums = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - torch.where(sums == -torch.inf, 0.0, sums).unsqueeze(-1))
        repeated = value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)
        out.copy_(weights @ repeated)
        lse.copy_(sums)
        self.spoil(query, out, lse)
        return out, lse

    def active(self, plan: MaskPlan) -> Tensor:
        return plan.tensors[0].bool()

    def scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        return query.float() @ key.float().repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale

    def spoil(self, query: Tensor, out: Tensor, lse: Tensor) -> None:
        """Do something wrong; nothing here."""


class Padded(ByPyTorch):
    """Gives keys past the end, zero-filled, a weight of exp(0)."""

    def spoil(self, query: Tensor, out: Tensor, lse: Tensor) -> None:
        sums = torch.logaddexp(lse, torch.zeros_like(lse))
        out.mul_(torch.exp(lse - sums).unsqueeze(-1))
        lse.copy_(sums)


class WrongScale(ByPyTorch):
    """Off by one part in two thousand."""

    def scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        return super().scores(query, key, scale * 1.0005)


class OneKeyTooFew(ByPyTorch):
    """Misses one key of the last query row, where that row has several hundred."""

    def active(self, plan: MaskPlan) -> Tensor:
        active = super().active(plan).clone()
        if active.shape[-1] > 1000:
            last = int(active[0, 0, -1].nonzero()[-1])
            assert active[0, 0, -1].sum() > 400
            active[:, :, -1, last] = False
        return active


class Changing(ByPyTorch):
    """A second call gives the last bit differently."""

    calls = 0

    def spoil(self, query: Tensor, out: Tensor, lse: Tensor) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            lse.copy_(torch.nextafter(lse, torch.full_like(lse, torch.inf)))


def _unwritten(query: Tensor, out: Tensor, lse: Tensor) -> None:
    from tilewright.tuner.layouts import poison

    poison(out[:, :, -1:, -1:])


def _computed_nan(query: Tensor, out: Tensor, lse: Tensor) -> None:
    out[:, :, -1, 3] = torch.nan


def _beside(query: Tensor, out: Tensor, lse: Tensor) -> None:
    if out.storage_offset() == 64:  # not in the far layouts, whose buffer is not filled
        out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()


def _beside_lse(query: Tensor, out: Tensor, lse: Tensor) -> None:
    lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel()).zero_()


def _inputs(query: Tensor, out: Tensor, lse: Tensor) -> None:
    query[-1, -1, -1, -1] += 1


def _base_two(query: Tensor, out: Tensor, lse: Tensor) -> None:
    lse.mul_(1.4426950408889634)


def _finite_lse(query: Tensor, out: Tensor, lse: Tensor) -> None:
    lse.nan_to_num_(neginf=-1e30)


def _mean_of_nothing(query: Tensor, out: Tensor, lse: Tensor) -> None:
    out[lse == -torch.inf] = 1e-6


def _one_element(query: Tensor, out: Tensor, lse: Tensor) -> None:
    out[-1, -1, -1, -1] += 0.125


def _all_a_little(query: Tensor, out: Tensor, lse: Tensor) -> None:
    out.add_(out.abs().amax() * 2**-8)


def spoiled(spoil: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[str], ByPyTorch]:
    """A kernel that is right, and then does this."""

    def make(dtype: str) -> ByPyTorch:
        kernel = ByPyTorch(dtype)
        kernel.spoil = spoil  # type: ignore[method-assign, assignment]
        return kernel

    return make


WRONG: dict[str, tuple[Callable[[str], ByPyTorch], str]] = {
    "zero-filled tail keys": (Padded, "lse"),
    "wrong scale": (WrongScale, "lse is off"),
    "one key of hundreds missing": (OneKeyTooFew, "lse is off"),
    "partly written": (spoiled(_unwritten), "never written"),
    "computed NaN": (spoiled(_computed_nan), "NaN or infinite"),
    "writes beside out": (spoiled(_beside), "beside the outputs"),
    "writes beside lse": (spoiled(_beside_lse), "beside the outputs"),
    "changes its inputs": (spoiled(_inputs), "inputs were changed"),
    "lse in base two": (spoiled(_base_two), "lse is off"),
    "finite lse of empty rows": (spoiled(_finite_lse), "lse = -inf"),
    "empty rows not zero": (spoiled(_mean_of_nothing), "are not 0"),
    "one element wrong": (spoiled(_one_element), "largest error"),
    "every element a little off": (spoiled(_all_a_little), "error"),
    "another answer the second time": (Changing, "other bits"),
}

DTYPES = ["float32", "float16", "bfloat16"]


@pytest.fixture(scope="module")
def book() -> CaseBook:
    return CaseBook(CPU)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_kernel_passes(dtype: str, book: CaseBook) -> None:
    report = verify(ByPyTorch(dtype), CPU, book=book)
    assert report.ok, report.message
    assert report.cases == len(book.cases_for(ByPyTorch(dtype).kernel))
    assert 0 < report.rms_error < report.max_error
    assert report.worst_ratio < 0.8
    assert report.skipped == ()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught(name: str, book: CaseBook) -> None:
    _is_caught(name, "float32", book)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["one key of hundreds missing", "wrong scale", "one element wrong", "partly written"])
def test_rounding_to_16_bits_hides_nothing(name: str, dtype: str, book: CaseBook) -> None:
    _is_caught(name, dtype, book)


def test_inputs_that_were_changed_are_restored_for_the_next_kernel(book: CaseBook) -> None:
    _is_caught("changes its inputs", "float32", book)
    assert verify(ByPyTorch("float32"), CPU, book=book).ok


def _is_caught(name: str, dtype: str, book: CaseBook) -> None:
    make, reason = WRONG[name]
    report = verify(make(dtype), CPU, book=book)
    assert not report.ok
    assert reason in report.message
    assert f"case '{report.case}'" in report.message


def test_a_launch_that_fails_is_no_wrong_result(book: CaseBook) -> None:
    class Refuses(ByPyTorch):
        def spoil(self, query: Tensor, out: Tensor, lse: Tensor) -> None:
            raise LaunchFailed("too many registers")

    with pytest.raises(LaunchFailed, match="too many registers"):
        verify(Refuses("float32"), CPU, book=book)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(9, 0) | masks.global_stride(50)], ids=str)
def test_pytorch_itself_is_within_the_bounds(mask: masks.Mask | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, 2, 300, 64, generator=generator).to(dtype) for _ in range(3))
    expected = expect(query, key, value, mask, 0.125)
    dense = None if mask is None else mask.dense(1, 2, 300, 300)
    error = (F.scaled_dot_product_attention(query, key, value, attn_mask=dense).double() - expected.out).abs()
    assert error.max() <= expected.max_bound
    assert error.square().mean().sqrt() <= expected.rms_bound
    # And the bounds say something: they are a small part of the outputs.
    size = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert expected.max_bound < size * expected.out.abs().max()
    assert expected.rms_bound < size * expected.out.square().mean().sqrt()
    assert expected.lse_bound < 3e-4


def test_empty_rows_do_not_blow_up_the_bounds() -> None:
    query, key, value = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(2)) for n in (90, 30, 30))
    expected = expect(query, key, value, masks.causal(), 0.125)
    assert expected.max_bound < 1e-3
    assert expected.lse_bound < 1e-3


def test_rows_are_sampled_at_both_ends_and_between() -> None:
    rows = sample_rows(1, 8, 8192, 8192, 64, "cpu")
    assert rows == sorted(set(rows))
    assert {0, 1, 8190, 8191} <= set(rows)
    assert any(1000 < row < 7000 for row in rows)
    assert 128 <= len(rows) <= 256
    assert sample_rows(1, 1, 40, 40, 64, "cpu") == list(range(40))
    assert 8 <= len(sample_rows(1, 64, 2**20, 2**20, 128, "cpu")) <= 16


def test_a_call_of_ones_own_is_compared_on_the_sampled_rows() -> None:
    query, key, value = (torch.randn(1, 2, 600, 32, generator=torch.Generator().manual_seed(9)) for _ in range(3))
    mask = masks.causal()
    plan = build_plan(
        canonical(mask, 600, 600), "scan", 64, 64, batch=1, num_heads=2, seqlen_q=600, seqlen_kv=600, device=CPU
    )
    expected = expect(query, key, value, mask, 0.3, [0, 1, 300, 599])
    report = verify_call(ByPyTorch("float32"), query, key, value, plan, 0.3, expected, "row W7")
    assert report.ok
    assert report.message == "row W7: 4 of 600 query rows within bounds"
    for name, (make, reason) in WRONG.items():
        if name in ("zero-filled tail keys", "writes beside lse", "changes its inputs", "one element wrong"):
            spoilt = [t.clone() for t in (query, key, value)]
            report = verify_call(make("float32"), spoilt[0], spoilt[1], spoilt[2], plan, 0.3, expected)
            assert not report.ok
            assert reason in report.message


REAL = [
    ("float32", 64, ("window", "stride")),
    ("float16", 32, ("bound", "and_bits")),
    ("bfloat16", 48, ("document", "and_blocks")),
]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "terms"), REAL, ids=lambda v: "+".join(v) if type(v) is tuple else str(v)
)
def test_the_default_cpu_kernel_passes(dtype: str, head_dim: int, terms: tuple[str, ...]) -> None:
    _verify_default(Problem(dtype, head_dim, 1, 2, 2, 512, 512, "cpu", MaskClass(terms)), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "terms"), REAL, ids=lambda v: "+".join(v) if type(v) is tuple else str(v)
)
def test_the_default_gpu_kernel_passes(dtype: str, head_dim: int, terms: tuple[str, ...]) -> None:
    from tilewright.generator.arch import arch_of_capability

    arch = arch_of_capability(*torch.cuda.get_device_capability())
    problem = Problem(dtype, head_dim, 1, 2, 2, 512, 512, arch.name, MaskClass(terms))
    _verify_default(problem, torch.device("cuda", 0))


def _verify_default(problem: Problem, device: torch.device) -> None:
    kernel = kernel_of(problem, default_variant(problem))
    artifact = build(kernel)
    report = verify(LoadedKernel(artifact, kernel, module_name(kernel, artifact)), device)
    assert report.ok, report.message
    assert report.cases >= 14
