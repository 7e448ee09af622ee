"""Every modifier that the handlers know; anything else is refused rather than guessed at."""


def _words(text: str) -> set[str]:
    return set(text.split())


_INT = "b16 b32 b64 u16 u32 u64 s16 s32 s64 "


_FLT = "f16 f16x2 bf16 bf16x2 f32 f32x2 f64 rn rz rm rp ftz sat "


_CMPS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor "


_MEMS = (
    "weak relaxed acquire release volatile mmio cta cluster gpu sys global shared shared::cta shared::cluster local const "
    "param param::entry nc L1::evict_normal L1::evict_first L1::evict_last L1::no_allocate L1::evict_unchanged "
    "L2::evict_normal L2::evict_first L2::evict_last L2::cache_hint L2::64B L2::128B L2::256B ca cg cs lu cv wb wt v2 v4 v8 "
    "b8 u8 s8 f32 f64 " + _INT
)


_BULK = (
    "async bulk tensor 1d 2d 3d 4d 5d tile tile::gather4 tile::scatter4 shared::cta shared::cluster global mbarrier::complete_tx::bytes bulk_group "
    "L2::cache_hint multicast::cluster cta_group::1 cta_group::2 add min max and or xor inc dec f16 bf16 f32 f64 u32 s32 u64 "
    "s64 b32 b64 noftz commit_group wait_group wait_all read prefetch L2 reduce ca cg shared mbarrier arrive noinc "
    "mbarrier::arrive L2::64B L2::128B L2::256B b64 cta cluster"
)


# every modifier that the handlers know; anything else is refused rather than guessed at
ALLOWED = {
    "add": _words(_INT + _FLT),
    "sub": _words(_INT + _FLT),
    "mul": _words(_INT + _FLT + "lo hi wide"),
    "mad": _words(_INT + _FLT + "lo hi wide"),
    "fma": _words(_FLT + "relu"),
    "div": _words(_INT + _FLT + "approx full"),
    "rem": _words(_INT),
    "min": _words(_INT + _FLT + "NaN abs relu u16x2 s16x2"),
    "max": _words(_INT + _FLT + "NaN abs relu u16x2 s16x2"),
    "neg": _words(_INT + _FLT),
    "abs": _words(_INT + _FLT),
    "and": _words(_INT + "pred"),
    "or": _words(_INT + "pred"),
    "xor": _words(_INT + "pred"),
    "not": _words(_INT + "pred"),
    "shl": _words(_INT),
    "shr": _words(_INT),
    "shf": _words("l r clamp wrap b32"),
    "lop3": _words("b32"),
    "prmt": _words("b32"),
    "bfe": _words(_INT),
    "bfi": _words(_INT),
    "bmsk": _words("clamp b32"),
    "szext": _words("clamp u32 s32"),
    "popc": _words(_INT),
    "clz": _words(_INT),
    "brev": _words(_INT),
    "bfind": _words(_INT + "shiftamt"),
    "sad": _words("u32 s32"),
    "dp4a": _words("u32 s32"),
    "setp": _words(_INT + _FLT + _CMPS),
    "set": _words(_INT + _FLT + _CMPS),
    "selp": _words(_INT + "f32 f64"),
    "slct": _words(_INT + "f32 f64 ftz"),
    "ex2": _words(_FLT + "approx"),
    "lg2": _words(_FLT + "approx"),
    "rcp": _words(_FLT + "approx"),
    "sqrt": _words(_FLT + "approx"),
    "rsqrt": _words(_FLT + "approx"),
    "sin": _words(_FLT + "approx"),
    "cos": _words(_FLT + "approx"),
    "tanh": _words(_FLT + "approx"),
    "mov": _words(_INT + "f32 f64 pred b128 f16 bf16"),
    "cvt": _words(_INT + _FLT + "u8 s8 rni rzi rmi rpi rna relu satfinite e4m3x2 e5m2x2 ue8m0x2 tf32"),
    "ld": _words(_MEMS),
    "st": _words(_MEMS + "async mbarrier::complete_tx::bytes"),
    "bra": _words("uni"),
    "ret": _words("uni"),
    "exit": set(),
    "shfl": _words("sync up down bfly idx b32"),
    "vote": _words("sync ballot any all uni b32 pred"),
    "elect": _words("sync"),
    "match": _words("any all sync b32 b64"),
    "redux": _words("sync add min max and or xor s32 u32 b32 f32 abs NaN"),
    "bar": _words("sync arrive warp cta red"),
    "barrier": _words("sync arrive cluster wait aligned relaxed acquire release cta"),
    "atom": _words(_MEMS + "add exch cas min max and or xor inc dec noftz f16 bf16 f16x2 bf16x2"),
    "red": _words(_MEMS + "add min max and or xor inc dec noftz f16 bf16 f16x2 bf16x2"),
    "cp": _words(_BULK),
    "mbarrier": _words(
        "init inval arrive arrive_drop expect_tx complete_tx try_wait test_wait parity noComplete shared shared::cta "
        "shared::cluster b64 release acquire relaxed cta cluster"
    ),
    "wgmma": _words(
        "fence commit_group wait_group mma_async sync aligned f32 f16 bf16 e4m3 e5m2 "
        + " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (16, 32))
    ),
    "tcgen05": _words(
        "alloc dealloc relinquish_alloc_permit cta_group::1 cta_group::2 sync aligned shared shared::cta shared::cluster b32 "
        "ld st wait::ld wait::st fence::before_thread_sync fence::after_thread_sync 32x32b 16x64b 16x128b 16x256b 16x32bx2 "
        "x1 x2 x4 x8 x16 x32 x64 x128 pack::16b unpack::16b commit mbarrier::arrive::one multicast::cluster b64 mma ws "
        "kind::f16 kind::f8f6f4 kind::tf32 collector::a::discard collector::a::fill collector::a::use collector::a::lastuse "
        "collector::b0::discard collector::b0::fill collector::b0::use collector::b0::lastuse collector::b1::discard "
        "collector::b1::fill collector::b1::use collector::b1::lastuse collector::b2::fill collector::b2::use "
        "collector::b3::fill collector::b3::use cp 128x256b 4x256b 128x128b 64x128b 32x128b warpx2::02_13 warpx2::01_23 "
        "warpx4"
    ),
    "ldmatrix": _words("sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16"),
    "stmatrix": _words("sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16"),
    "mma": _words("sync aligned m16n8k16 m16n8k8 m16n8k32 row col f32 f16 bf16 e4m3 e5m2"),
}


MAY_FAIL = {"ld", "st", "atom", "red", "mbarrier", "cp", "ldmatrix", "stmatrix", "wgmma", "tcgen05", "bar", "barrier", "trap", "ldu"}


def may_fail(i):
    """Can this instruction raise a SimError, so that its line must be known?"""
    return i.parts[0] in MAY_FAIL and not (i.parts[0] == "ld" and "param" in i.parts)
