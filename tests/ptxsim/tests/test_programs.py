"""Programs written by hand in PTX, run by the machine itself: no part of the DSL is needed."""

import struct

import pytest
import torch
from needed import need

need()

import ptxsim
from ptxsim.machine.machine import Machine
from ptxsim.translate.ptx import Module

HEAD = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0, .param .u32 kernel_param_1)
{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .f32 %f<8>;
    .reg .b64 %rd<8>;
    .shared .align 16 .b8 tile[1024];
    ld.param.u64 %rd1, [kernel_param_0];
    ld.param.u32 %r1, [kernel_param_1];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd1, %rd2;
"""


def run(body: str, data: torch.Tensor, number: int = 0, threads: int = 32, **options) -> Machine:
    """Run HEAD and `body`: %rd3 points at this thread's word of `data`, %r1 is `number`, %r2 the thread."""
    machine = Machine(fill=0xFF, **options)
    bounds = (data.data_ptr(), data.data_ptr() + data.nbytes)
    machine.launch(
        Module(HEAD + body + "\n}\n"), "kernel", (1, 1, 1), (threads, 1, 1), params=struct.pack("<QI", data.data_ptr(), number), ranges=[bounds]
    )
    return machine


def test_divergent_lanes_meet_again() -> None:
    """Lane n adds n, n-1, ..., 1: a loop whose trip count differs for each lane, between two shuffles that need all of them."""
    out = torch.zeros(32, dtype=torch.int32)
    run(
        """
    mov.u32 %r3, 0;
    mov.u32 %r4, %r2;
loop:
    setp.eq.u32 %p1, %r4, 0;
    @%p1 bra done;
    add.u32 %r3, %r3, %r4;
    sub.u32 %r4, %r4, 1;
    bra loop;
done:
    shfl.sync.idx.b32 %r5, %r3, %r1, 31, -1;
    sub.u32 %r5, %r3, %r5;
    st.global.u32 [%rd3], %r5;
    ret;""",
        out,
        number=3,
    )
    lanes = torch.arange(32)
    assert out.tolist() == (lanes * (lanes + 1) // 2 - 6).tolist()


EXCHANGE = """
    mov.u32 %r3, tile;
    shl.b32 %r4, %r2, 2;
    add.u32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r2;
    BARRIER
    xor.b32 %r6, %r4, 128;
    add.u32 %r6, %r3, %r6;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%rd3], %r7;
    ret;"""


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_warps_exchange_through_shared_memory(order: str) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    run(EXCHANGE.replace("BARRIER", "bar.sync 0;"), out, threads=64, order=order)
    assert out.tolist() == [*range(32, 64), *range(32)]


def test_unwritten_shared_memory_shows() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    run(EXCHANGE.replace("BARRIER", ""), out, threads=64)
    assert (out == -1).sum() == 32  # the warp that comes first reads the fill


def test_barrier_that_one_warp_skips_deadlocks() -> None:
    body = "setp.lt.u32 %p1, %r2, 32;\n    @%p1 bra out;\n    bar.sync 1, 64;\nout:\n    ret;"
    with pytest.raises(ptxsim.Deadlock, match=r"1 warps stand at:\n.*warp 1 .*bar 1 \(32/64\)"):
        run(body, torch.zeros(64), threads=64)


def test_mbarrier_counts_arrivals() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = """
    mov.u32 %r3, tile;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra ready;
    mbarrier.init.shared.b64 [%r3], 64;
ready:
    bar.sync 0;
    mbarrier.arrive.shared.b64 %rd4, [%r3];
wait:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra wait;
    st.global.u32 [%rd3], %r1;
    ret;"""
    run(body, out, number=7, threads=64)
    assert out.tolist() == [7] * 64
    with pytest.raises(ptxsim.SimError, match="too many arrivals on mbar@"):
        run(body.replace("%rd4, [%r3];", "%rd4, [%r3], 3;"), out, threads=64)  # the last of 64 is in the middle of a 3
    with pytest.raises(ptxsim.Deadlock, match="parity 0"):
        run(body.replace("[%r3], 64", "[%r3], 65"), out, threads=64)
    with pytest.raises(ptxsim.SimError, match="uninitialised mbarrier"):
        run(body.replace("mbarrier.init.shared.b64 [%r3], 64;", ""), out, threads=64)


BULK_STORE = """
    mov.u32 %r3, tile;
    shl.b32 %r4, %r2, 2;
    add.u32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r2;
    FENCE
    bar.sync 0;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra out;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
out:
    ret;"""


def test_missing_proxy_fence_is_a_hazard() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    assert not run(BULK_STORE.replace("FENCE", "fence.proxy.async.shared::cta;"), out, hazards="error").found
    assert out.tolist() == list(range(32))
    [(kind, text)] = run(BULK_STORE.replace("FENCE", ""), out, hazards="collect").found
    assert kind == "proxy" and "without fence.proxy.async" in text
    with pytest.raises(ptxsim.SimError, match=r"without fence\.proxy\.async"):
        run(BULK_STORE.replace("FENCE", ""), out, hazards="error")


@pytest.mark.parametrize(
    "body,complaint",
    [
        ("st.global.u32 [%rd3+4], %r1; ret;", "global store of 4 bytes out of bounds at .* lane 31"),
        ("st.global.u32 [%rd3+-4], %r1; ret;", "global store of 4 bytes out of bounds at .* lane 0"),
        ("setp.ne.u32 %p1, %r2, 0; @%p1 ret; ld.global.u32 %r3, [%rd3+2]; ret;", "misaligned global load of 4 bytes"),
        ("mov.u32 %r3, tile; ld.shared.u32 %r4, [%r3+4096]; ret;", "shared load outside the CTA's"),
        ("trap;", r"kernel kernel cta \(0, 0, 0\) warp 0 line 17: trap"),
        ("add.u32.novel %r3, %r1, %r1; ret;", r"unsupported instruction: add\.u32\.novel .*modifier \.novel"),
        ("frobnicate.u32 %r3, %r1; ret;", r"unsupported instruction: frobnicate\.u32"),
    ],
)
def test_mistakes_are_named(body: str, complaint: str) -> None:
    with pytest.raises(ptxsim.SimError, match=complaint):
        run(body, torch.zeros(32, dtype=torch.int32))


@pytest.mark.parametrize("instruction", ["add.rn.sat.f32 %f1, %f1, %f2", "mul.rn.sat.f32 %f1, %f1, %f3", "fma.rn.sat.f32 %f1, %f1, %f3, %f2"])
def test_saturated_results_lie_between_0_and_1(instruction: str) -> None:
    """NaN is +0 then."""
    values = torch.tensor([float("nan"), float("-inf"), -2.0, -0.5, 0.0, 0.25, 1.0, 1.5, float("inf")])
    run(
        f"ld.global.f32 %f1, [%rd3]; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f3F800000; {instruction}; st.global.f32 [%rd3], %f1; ret;",
        values,
        threads=9,
    )
    assert values.tolist() == [0, 0, 0, 0, 0, 0.25, 1, 1, 1] and not values.signbit()[0]
