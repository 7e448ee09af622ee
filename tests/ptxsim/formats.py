"""Number formats: decode to float32, encode from float32 (round to nearest even unless said)."""

import numpy as np

# Named by size in bytes, as numpy's own codes are.
f2, f4, f8 = np.float16, np.float32, np.float64
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64


def _fp8_table(ebits, mbits, bias, kind):
    """The value of each code; `kind` says which codes are NaN and infinity."""
    out = np.zeros(256, f4)
    nb = 1 + ebits + mbits
    for c in range(256):
        c2 = c & ((1 << nb) - 1)
        s = -1.0 if (c2 >> (ebits + mbits)) & 1 else 1.0
        e = (c2 >> mbits) & ((1 << ebits) - 1)
        m = c2 & ((1 << mbits) - 1)
        if kind == "e4m3" and e == 15 and m == 7:
            v = np.nan
        elif kind == "e5m2" and e == 31:
            v = np.inf if m == 0 else np.nan
        elif e == 0:
            v = m * 2.0 ** (1 - bias - mbits)
        else:
            v = (1 + m / (1 << mbits)) * 2.0 ** (e - bias)
        out[c] = s * v
    return out


E4M3 = _fp8_table(4, 3, 7, "e4m3")
E5M2 = _fp8_table(5, 2, 15, "e5m2")
E2M3 = _fp8_table(2, 3, 1, "")
E3M2 = _fp8_table(3, 2, 3, "")
E2M1 = _fp8_table(2, 1, 1, "")
UE8M0 = np.array([2.0 ** (i - 127) for i in range(255)] + [np.nan], f4)


def bf16_to_f32(x):  # uint16 array -> f32
    return (x.astype(u4) << 16).view(f4)


def f16_to_f32(x):
    return np.ascontiguousarray(x).view(f2).astype(f4)


def f32_to_bf16(x, rnd="rn", relu=False):
    x = np.ascontiguousarray(x, f4)
    u = x.view(u4)
    r = (u + (((u >> 16) & 1) + 0x7FFF)) >> 16 if rnd == "rn" else u >> 16
    r = r.astype(u2)
    nan = x != x
    if nan.any():
        r = np.where(nan, u2(0x7FFF), r)
    if relu:
        r = np.where((r >> 15).astype(bool) & ~nan, u2(0), r)
    return r


def f32_to_f16(x, rnd="rn", relu=False, sat=False):
    x = np.asarray(x, f4)
    if rnd == "rz":
        h = x.astype(f2)
        big = np.abs(h.astype(f4)) > np.abs(x)
        h = np.where(big, np.nextafter(h, f2(0)), h)
    else:
        with np.errstate(over="ignore"):
            h = x.astype(f2)
    if sat:
        h = np.clip(h, f2(-65504), f2(65504))
    r = h.view(u2)
    nan = x != x
    if nan.any():
        r = np.where(nan, u2(0x7FFF), r)
    if relu:
        r = np.where((r >> 15).astype(bool) & ~nan, u2(0), r)
    return r


def _enc8(x, mbits, minexp, maxv, nancode, relu):
    """round f32 to nearest even onto a grid of mbits below the leading one; saturating"""
    x = np.asarray(x, f4).astype(f8)
    if relu:
        x = np.where(x < 0, 0.0, x)
    a = np.abs(x)
    sign = (np.signbit(x)).astype(u1) << 7
    nan = a != a
    a = np.where(nan, 0.0, np.minimum(a, maxv * 2))
    _, e = np.frexp(a)
    e = np.maximum(e - 1, minexp)  # a = m * 2^e, m in [1,2)
    q = np.ldexp(np.rint(np.ldexp(a, mbits - e)), e - mbits)
    q = np.minimum(q, maxv)
    _, e2 = np.frexp(q)
    e2 = np.maximum(e2 - 1, minexp)
    m = np.ldexp(q, mbits - e2).astype(i4)  # includes the leading one when normal
    code = np.where(m >= (1 << mbits), ((e2 - minexp + 1) << mbits) + (m - (1 << mbits)), m)
    code = code.astype(u1) | sign
    if nan.any():
        code = np.where(nan, u1(nancode), code)
    return code


def f32_to_e4m3(x, relu=False):
    return _enc8(x, 3, -6, 448.0, 0x7F, relu)


def f32_to_e5m2(x, relu=False):
    return _enc8(x, 2, -14, 57344.0, 0x7F, relu)


def f32_to_ue8m0(x, rnd="rz", sat=True):
    x = np.asarray(x, f4).astype(f8)
    nan = x != x
    m, e = np.frexp(np.where(nan | (x <= 0), 1.0, np.where(np.isinf(x), 2.0**127, x)))
    e = e - 1 + 127
    if rnd == "rp":
        e = e + (m > 0.5)
    e = np.clip(e, 0, 254)
    e = np.where(x <= 0, 0, e)
    return np.where(nan, 255, e).astype(u1)


def round_dir(x, mode):
    """float64 -> float32 with a given direction"""
    r = x.astype(f4)
    if mode == "rn":
        return r
    d = r.astype(f8)
    if mode == "rm":
        return np.where(d > x, np.nextafter(r, f4(-np.inf)), r)
    if mode == "rp":
        return np.where(d < x, np.nextafter(r, f4(np.inf)), r)
    return np.where(np.abs(d) > np.abs(x), np.nextafter(r, f4(0)), r)


DEC = {
    "bf16": bf16_to_f32,
    "f16": f16_to_f32,
    "e4m3": lambda x: E4M3[x],
    "e5m2": lambda x: E5M2[x],
    "e2m3": lambda x: E2M3[x],
    "e3m2": lambda x: E3M2[x],
    "e2m1": lambda x: E2M1[x],
}
EBYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "e2m3": 1, "e3m2": 1, "e2m1": 1, "tf32": 4}


def tf32_to_f32(x):
    return (x & u4(0xFFFFE000)).view(f4)


DEC["tf32"] = tf32_to_f32
