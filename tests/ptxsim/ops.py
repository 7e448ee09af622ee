"""Pure helpers used by generated code: arithmetic on 32-lane arrays, shuffles, mma.sync."""

import numpy as np

from .formats import (
    DEC,
    bf16_to_f32,
    f2,
    f4,
    f8,
    f32_to_bf16,
    f32_to_f16,
    i1,
    i2,
    i4,
    i8,
    round_dir,
    u1,
    u2,
    u4,
    u8,
)

SHARED_WIN = 1 << 56
LOCAL_WIN = 1 << 57
LANE = np.arange(32)
_LANE_U = np.arange(32, dtype=u4)
_POW = u8(1) << np.arange(32, dtype=u8)
_TINY = f4(np.finfo(f4).tiny)
_empty = np.empty


def packf(a, b):
    """Two fp32 registers -> an f32x2 one."""
    t = _empty(64, f4)
    t[0::2] = a
    t[1::2] = b
    return t


def pack2(a, b):
    """Two 32-bit registers -> a 64-bit one."""
    t = _empty(64, u4)
    t[0::2] = a
    t[1::2] = b
    return t.view(u8)


def packh(a, b):
    """Two 16-bit registers -> a 32-bit one."""
    t = _empty(64, u2)
    t[0::2] = a
    t[1::2] = b
    return t.view(u4)


def packh4(*a):
    """Four 16-bit registers -> a 64-bit one."""
    return np.stack(a, 1).astype(u2).ravel().view(u8)


def packb4(*a):
    """Four 8-bit values -> a 32-bit register."""
    return np.stack(a, 1).astype(u1).ravel().view(u4)


def unh(x, h):
    """b16 or packed b32 register -> float32 array ([32] or [64], low half first)"""
    x = np.ascontiguousarray(x)
    if x.dtype != u2:
        x = x.view(u2)
    return bf16_to_f32(x) if h == "bf16" else x.view(f2).astype(f4)


def toh(x, h, width):
    """float32 -> f16 or bf16 in registers of `width` bytes."""
    x = np.asarray(x, f4)
    r = f32_to_bf16(x) if h == "bf16" else f32_to_f16(x)
    return r if width == 2 else np.ascontiguousarray(r).view(u4)


def cvt2(hi, lo, h, rnd, relu, sat):
    """Two fp32 -> a packed pair of h, `lo` first."""
    t = _empty(64, f4)
    t[0::2] = lo
    t[1::2] = hi
    r = f32_to_bf16(t, rnd, relu) if h == "bf16" else f32_to_f16(t, rnd, relu, sat)
    return r.view(u4)


def dec8x2(x, t):
    """A pair of fp8 -> float32 [64]."""
    b = np.ascontiguousarray(x, dtype=u2).view(u1)
    return DEC[t](b)


def enc8x2(x, fn, relu):
    """float32 [64] -> pairs of fp8."""
    return np.ascontiguousarray(fn(x, relu)).view(u2)


def to_tf32(x, rna):
    """Rounded to tf32, ties away (`rna`) or to even."""
    u = np.ascontiguousarray(x, f4).view(u4)
    if rna:
        return (u + 0x1000) & 0xFFFFE000
    return (u + (0xFFF + ((u >> 13) & 1))) & 0xFFFFE000


def ftz(x):
    """Denormals to zero."""
    return np.where(np.abs(x) < _TINY, np.copysign(f4(0), x), x)


def fma(a, b, c):
    """One rounding: the product is exact in fp64."""
    return (np.multiply(a, b, dtype=f8) + c).astype(f4)


def fma_d(a, b, c, r):
    """fma with rounding direction r."""
    return round_dir(np.multiply(a, b, dtype=f8) + c, r)


def bin_d(a, b, o, r):
    """a o b with rounding direction r."""
    a = np.asarray(a, f8)
    b = np.asarray(b, f8)
    x = a + b if o == "+" else a - b if o == "-" else a * b
    return round_dir(x, r)


def fdiv(a, b):
    return a / b


def rcp(x):
    return f4(1) / x if x.dtype == f4 else 1 / x


def rsqrt(x):
    return (1 / np.sqrt(x.astype(f8))).astype(x.dtype)


def idiv(a, b):
    """Truncating division; by zero gives all ones."""
    z = b == 0
    b = np.where(z, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(z, ~a, a // b)
    q = np.abs(a.astype(object if a.dtype == i8 else i8)) // np.abs(b.astype(object if a.dtype == i8 else i8))
    return (q * np.where((a < 0) != (b < 0), -1, 1)).astype(a.dtype)


def irem(a, b):
    """Remainder of `idiv`."""
    z = b == 0
    b1 = np.where(z, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(z, a, a % b1)
    return (a - idiv(a, b1) * b1).astype(a.dtype)


def mulhi64(a, b, signed):
    r = [((int(x) * int(y)) >> 64) for x, y in zip(a, b, strict=False)]
    if signed:
        return np.array(r, dtype=object).astype(i8)
    return np.array(r, dtype=u8)


def mm16(a, b, signed, mx):
    """Minimum or maximum of pairs of 16-bit integers."""
    t = i2 if signed else u2
    x, y = np.ascontiguousarray(a).view(t), np.ascontiguousarray(b).view(t)
    return (np.maximum(x, y) if mx else np.minimum(x, y)).view(u4)


def shl(a, b):
    """Shifts of the register's width and more give 0."""
    bits = a.dtype.itemsize * 8
    b = np.asarray(b, u4)
    big = b >= bits
    return np.where(big, a.dtype.type(0), a << np.where(big, u4(0), b).astype(a.dtype))


def shr(a, b):
    """Shifts of the register's width and more give 0, or the sign."""
    bits = a.dtype.itemsize * 8
    b = np.asarray(b, u4)
    if a.dtype.kind == "i":
        return a >> np.minimum(b, bits - 1).astype(a.dtype)
    big = b >= bits
    return np.where(big, a.dtype.type(0), a >> np.where(big, u4(0), b).astype(a.dtype))


def shf(a, b, c, d, mode):
    """Funnel shift."""
    n = np.minimum(c, 32) if mode == "clamp" else c & 31
    v = (b.astype(u8) << 32) | a
    n = n.astype(u8)
    if d == "l":
        return np.where(n >= 32, a, ((v << n) >> 32).astype(u4)).astype(u4)
    return (v >> n).astype(u4)


def lop3(a, b, c, lut):
    """Any function of three bits, by its truth table."""
    r = np.zeros(32, u4)
    for k in range(8):
        if lut >> k & 1:
            r |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return r


def prmt_i(a, b, sel):
    v = (b.astype(u8) << 32) | a
    by = v.view(u1).reshape(32, 8)
    out = _empty((32, 4), u1)
    for k in range(4):
        s = (sel >> (4 * k)) & 15
        x = by[:, s & 7]
        if s & 8:
            x = np.where(x & 0x80, u1(255), u1(0))
        out[:, k] = x
    return out.view(u4).ravel()


def prmt(a, b, sel):
    v = (b.astype(u8) << 32) | a
    by = v.view(u1).reshape(32, 8)
    out = _empty((32, 4), u1)
    for k in range(4):
        s = ((sel >> (4 * k)) & 15).astype(i8)
        x = by[LANE, s & 7]
        out[:, k] = np.where(s & 8, np.where(x & 0x80, u1(255), u1(0)), x)
    return out.view(u4).ravel()


def bfe(a, pos, ln):
    """Bit-field extract."""
    bits = a.dtype.itemsize * 8
    r = []
    for x, p, width in zip(a, pos, ln, strict=False):
        p, width = int(p) & 255, int(width) & 255
        x = int(x)
        ux = x & ((1 << bits) - 1)
        v = (ux >> p) & ((1 << width) - 1) if p < bits else 0
        if a.dtype.kind == "i" and width:
            top = min(p + width - 1, bits - 1)
            s = (ux >> top) & 1
            n = max(0, min(width, bits - p))
            if s:
                v |= ((1 << bits) - 1) & ~((1 << n) - 1)
        v &= (1 << bits) - 1
        if a.dtype.kind == "i" and v >> (bits - 1):
            v -= 1 << bits
        r.append(v)
    return np.array(r, a.dtype)


def bfi(a, b, pos, ln):
    """Bit-field insert."""
    bits = a.dtype.itemsize * 8
    full = (1 << bits) - 1
    r = []
    for x, y, p, width in zip(a, b, pos, ln, strict=False):
        p, width = int(p) & 255, int(width) & 255
        m = (((1 << width) - 1) << p) & full
        r.append((int(y) & ~m & full) | ((int(x) << p) & m))
    return np.array(r, a.dtype)


def bmsk(a, b):
    """Mask of b bits from bit a."""
    p, width = np.minimum(a, 32).astype(u8), np.minimum(b, 32).astype(u8)
    return ((((u8(1) << width) - u8(1)) << p) & u8(0xFFFFFFFF)).astype(u4)


def szext(x, n):
    """Extend from n bits."""
    n = np.minimum(n, 32)
    sh = (32 - n.astype(i8)).astype(i8)
    v = x.astype(i8)
    if x.dtype.kind == "i":
        return ((v << (32 + sh)) >> (32 + sh)).astype(i4)
    return (v & ((1 << (32 - sh)) - 1)).astype(u4)


def clz(x):
    bits = x.dtype.itemsize * 8
    return np.array([bits - int(v).bit_length() for v in x], u4)


def brev(x):
    bits = x.dtype.itemsize * 8
    return np.array([int(format(int(v), f"0{bits}b")[::-1], 2) for v in x], x.dtype)


def bfind(x, shiftamt):
    """Position of the highest bit that differs from the sign."""
    bits = x.dtype.itemsize * 8
    r = []
    for v in x:
        v = int(v)
        if v < 0:
            v = ~v
        n = v.bit_length() - 1
        r.append(0xFFFFFFFF if n < 0 else (bits - 1 - n if shiftamt else n))
    return np.array(r, u4)


def dp4a(a, b, c, sa, sb):
    x = np.ascontiguousarray(a).view(i1 if sa else u1).reshape(32, 4).astype(i8)
    y = np.ascontiguousarray(b).view(i1 if sb else u1).reshape(32, 4).astype(i8)
    return ((x * y).sum(1) + c).astype(u4)


def f2i(x, dw):
    """Saturating float to integer; NaN gives 0."""
    lo, hi = {
        "b": (0, 255),
        "B": (-128, 127),
        "h": (0, 65535),
        "H": (-32768, 32767),
        "u": (0, 2**32 - 1),
        "i": (-(2**31), 2**31 - 1),
        "U": (0, 2**64 - 1),
        "I": (-(2**63), 2**63 - 1),
    }[dw]
    t = {"b": u1, "B": i1, "h": u2, "H": i2, "u": u4, "i": i4, "U": u8, "I": i8}[dw]
    x = np.where(x != x, 0, x.astype(f8))
    if dw in "UI":
        return np.array([max(lo, min(hi, int(v) if np.isfinite(v) else (hi if v > 0 else lo))) for v in x], t)
    return np.clip(x, lo, hi).astype(i8).astype(t)


def i2f(x, dt, rnd):
    if dt == "f64":
        return x.astype(f8)
    if rnd == "rn" or x.dtype.itemsize == 8:
        return x.astype(f4)
    return round_dir(x.astype(f8), rnd)


def isat(x, lo, hi, t):
    """Saturate to [lo, hi]."""
    return np.array([max(lo, min(hi, int(v))) for v in x], t)


def ballot(c):
    """Bit n is lane n's."""
    return u4((_POW[c]).sum()) if c.any() else u4(0)


def first_lane(q):
    """The lowest lane of a mask."""
    return int(q.argmax())


def shfl(mode, x, b, c):
    b = b.astype(i8) & 31
    c = c.astype(i8)
    mask = (c >> 8) & 31
    clamp = c & 31
    lane = LANE
    maxl = (lane & mask) | (clamp & ~mask)
    minl = lane & mask
    if mode == "up":
        j = lane - b
        ok = j >= maxl
    elif mode == "down":
        j = lane + b
        ok = j <= maxl
    elif mode == "bfly":
        j = lane ^ b
        ok = j <= maxl
    else:
        j = minl | (b & ~mask)
        ok = j <= maxl
    j = np.where(ok, j, lane)
    return np.ascontiguousarray(x).take(j), ok


def match_(mode, x, act):
    eq = (x[:, None] == x[None, :]) & act[None, :]
    r = (eq * _POW[None, :]).sum(1).astype(u4)
    if mode == "any":
        return r, np.ones(32, bool)
    allm = (eq | ~act[None, :]).all(1)
    am = u4(_POW[act].sum())
    ok = bool(allm[act].all())
    return np.full(32, am if ok else 0, u4), np.full(32, ok)


def redux(op, x, act, nan, ab):
    v = x if act is None else x[act]
    if ab:
        v = np.abs(v)
    if op == "add":
        r = v.sum(dtype=v.dtype)
    elif op == "min":
        r = v.min() if (nan or v.dtype.kind != "f") else np.fmin.reduce(v)
    elif op == "max":
        r = v.max() if (nan or v.dtype.kind != "f") else np.fmax.reduce(v)
    elif op == "and":
        r = np.bitwise_and.reduce(v)
    elif op == "or":
        r = np.bitwise_or.reduce(v)
    else:
        r = np.bitwise_xor.reduce(v)
    return np.full(32, r, x.dtype)


def movmatrix(x):
    m = np.ascontiguousarray(x).view(u2).reshape(8, 8)
    return np.ascontiguousarray(m.T).view(u4).ravel()


def frag_a(regs, ty):
    """A fragment registers of one warp -> float32 [16, K]; 16-bit: 4 regs K=16 (2 regs K=8), 8-bit: 4 regs K=32"""
    t = u1 if ty in ("e4m3", "e5m2") else u2
    per = 4 // np.dtype(t).itemsize
    n = len(regs)
    x = np.stack([np.ascontiguousarray(r).view(t).reshape(8, 4, per) for r in regs])  # [reg, g, t, e]
    # reg r: row half = r & 1, k half = r >> 1
    x = x.reshape(n // 2, 2, 8, 4, per).transpose(1, 2, 0, 3, 4)  # half, g, khalf, t, e
    return DEC[ty](np.ascontiguousarray(x)).reshape(16, n // 2 * 4 * per)


def frag_b(regs, ty):
    t = u1 if ty in ("e4m3", "e5m2") else u2
    per = 4 // np.dtype(t).itemsize
    n = len(regs)
    x = np.stack([np.ascontiguousarray(r).view(t).reshape(8, 4, per) for r in regs])  # [reg, n, t, e]
    x = x.transpose(0, 2, 3, 1)
    return DEC[ty](np.ascontiguousarray(x)).reshape(n * 4 * per, 8)


def mma_sync(shape, tys, A, B, C):
    dt, at, bt, ct = tys
    if at not in ("bf16", "f16", "e4m3", "e5m2"):
        raise NotImplementedError(f"mma.sync {shape} {tys}")
    a = frag_a(A, at)
    b = frag_b(B, bt)
    d = a @ b
    if ct == "f32":
        c = np.stack(C).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)
    else:
        c = np.stack([unh(x, "f16").reshape(8, 4, 2) for x in C]).reshape(16, 8)
    d = d + c
    if dt == "f32":
        r = d.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
        return r
    return [toh(np.ascontiguousarray(d[8 * h : 8 * h + 8]).ravel(), "f16", 4) for h in range(2)]


_rel_cache = {}


def swizzle(ch, s):
    """Where 16-byte chunk `ch` stands. s: 0 none; 1, 2, 3: 32, 64, 128 bytes (log2 of the chunks in a row); 4: 128 bytes in atoms of 32."""
    if s == 0:
        return ch
    if s == 4:
        return ch ^ (((ch >> 3) & 3) << 1)
    m = (1 << s) - 1
    return ch ^ ((ch >> 3) & m)


def rel_chunks(s, mn_major, rows, kbytes, lbo, sbo, es):
    """16-byte-chunk offsets (before swizzling) of an operand of `rows` x (kbytes/es)
    K-major: array [rows, kbytes/16]; MN-major: array [K, rows*es/16]. lbo and sbo in chunks."""
    key = (s, mn_major, rows, kbytes, lbo, sbo, es)
    r = _rel_cache.get(key)
    if r is None:
        w = 8 if s in (3, 4) else 1 << s  # chunks in an atom row
        if not mn_major:
            rr = np.arange(rows)[:, None]
            c = np.arange(kbytes // 16)[None, :]
            r = rr // 8 * sbo + rr % 8 + c * lbo if s == 0 else rr // 8 * sbo + rr % 8 * w + c % w + c // w * lbo
        else:
            k = np.arange(kbytes // es)[:, None]
            c = np.arange(rows * es // 16)[None, :]
            r = c * sbo + k % 8 + k // 8 * lbo if s == 0 else c % w + c // w * lbo + k % 8 * w + k // 8 * sbo
        r = r.astype(i8)
        _rel_cache[key] = r
    return r
