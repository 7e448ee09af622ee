"""Run launches that ptxsim captured (device(capture=DIR)) on a real GPU and compare memory with the simulation.

python replay.py DIR     needs numpy and libcuda only"""

import ctypes as C
import glob
import os
import sys

import numpy as np

cu = C.CDLL("libcuda.so.1")


def ck(r, what=""):
    if r:
        s = C.c_char_p()
        cu.cuGetErrorString(r, C.byref(s))
        raise RuntimeError(f"{what}: {r} {s.value}")


class Attr(C.Structure):
    _fields_ = [("id", C.c_int), ("pad", C.c_int), ("v", C.c_uint32 * 16)]


class Cfg(C.Structure):
    _fields_ = [("g", C.c_uint * 3), ("b", C.c_uint * 3), ("smem", C.c_uint), ("stream", C.c_void_p), ("attrs", C.c_void_p), ("n", C.c_uint)]


def main(d):
    np.seterr(all="ignore")
    ck(cu.cuInit(0))
    dev, ctx = C.c_int(), C.c_void_p()
    ck(cu.cuDeviceGet(C.byref(dev), 0))
    ck(cu.cuDevicePrimaryCtxRetain(C.byref(ctx), dev))
    ck(cu.cuCtxSetCurrent(ctx))
    for f in [d]:
        z = np.load(f)
        img = z["cubin"].tobytes()
        mod, fn = C.c_void_p(), C.c_void_p()
        r = cu.cuModuleLoadData(C.byref(mod), img)
        if r:
            print(os.path.basename(f), "module load", r)
            continue
        name = str(z["name"])
        ck(cu.cuModuleGetFunction(C.byref(fn), mod, name.encode()), "function")
        n = len(z["starts"])
        st = [int(x) for x in z["starts"]]
        ptr = []
        for k in range(n):
            b = np.ascontiguousarray(z[f"before{k}"])
            p = C.c_uint64()
            ck(cu.cuMemAlloc_v2(C.byref(p), C.c_size_t(len(b) + 256)), "alloc")
            # keep the address modulo 256
            q = p.value + (st[k] - p.value) % 256
            ck(cu.cuMemcpyHtoD_v2(C.c_uint64(q), b.ctypes.data_as(C.c_void_p), C.c_size_t(len(b))), "copy")
            ptr.append(q)
        par = z["params"].copy()
        w = par[: len(par) // 8 * 8].view(np.uint64)
        for j in range(len(w)):
            for k in range(n):
                if st[k] <= int(w[j]) < st[k] + len(z[f"before{k}"]):
                    w[j] = ptr[k] + int(w[j]) - st[k]
        # TMA descriptors: the DSL's host code leaves 2 in the version field and rubbish after 64 bytes; what the
        # driver of a Hopper card writes there is 0, the box size and the swizzle span
        w4 = par[: len(par) // 4 * 4].view(np.uint32)
        moved = [int(x) for x in w]
        for o in range(0, len(par) - 127, 64):
            k = o // 4
            if w4[k + 2] & 15 == 2 and w4[k + 2] > 15 and any(q <= moved[o // 8] < q + len(z[f"before{j}"]) for j, q in enumerate(ptr)):
                w4[k + 2] &= 0xFFFFFFF0
                w4[k + 16 : k + 32] = 0
        smem = int(z["smem"])
        if smem > 48 * 1024:
            ck(cu.cuFuncSetAttribute(fn, 8, smem), "smem")
        cl = [int(x) for x in z["cluster"]]
        a = Attr()
        a.id = 4
        a.v[0], a.v[1], a.v[2] = cl
        cfg = Cfg()
        cfg.g[:], cfg.b[:] = [int(x) for x in z["grid"]], [int(x) for x in z["block"]]
        cfg.smem = smem
        cfg.attrs, cfg.n = (C.addressof(a), 1) if max(cl) > 1 else (None, 0)
        ptrs = [par.ctypes.data + int(o) for o in z["offsets"]]
        r = cu.cuLaunchKernelEx(C.byref(cfg), fn, (C.c_void_p * len(ptrs))(*ptrs), None)
        if r:
            print(os.path.basename(f), "launch failed", r, "smem", smem, "params", len(ptrs), len(par))
            continue
        ck(cu.cuCtxSynchronize(), "run " + name)
        out = []
        for k in range(n):
            ref, bef = z[f"after{k}"], z[f"before{k}"]
            got = np.empty_like(ref)
            ck(cu.cuMemcpyDtoH_v2(got.ctypes.data_as(C.c_void_p), C.c_uint64(ptr[k]), C.c_size_t(len(got))), "back")
            if np.array_equal(ref, bef) and np.array_equal(got, bef):
                continue
            same = float((ref == got).mean())
            m = len(ref) // 4 * 4
            x, y = ref[:m].view(np.float32), got[:m].view(np.float32)
            ok = np.isfinite(x) & np.isfinite(y)
            e4 = float(np.abs(x - y)[ok].max()) if ok.any() else 0
            g = (ref[:m].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            h = (got[:m].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            ok = np.isfinite(g) & np.isfinite(h)
            e2 = float(np.abs(g - h)[ok].max()) if ok.any() else 0
            el = float((ref[:m].view(np.uint16) == got[:m].view(np.uint16)).mean()) if m else 1
            out.append(f"[{len(ref)} B: bytes equal {same:.5f}, 16-bit words equal {el:.5f}, max diff as f32 {e4:.3g}, as bf16 {e2:.3g}]")
        print(os.path.basename(f), name[:50], "grid", [int(x) for x in z["grid"]], "cluster", cl, *(out or ["memory unchanged on both"]))
        cu.cuModuleUnload(mod)


if __name__ == "__main__":
    if sys.argv[1].endswith(".npz"):
        main(sys.argv[1])
    else:  # one process each: an error spoils its context
        import subprocess

        for f in sorted(glob.glob(os.path.join(sys.argv[1], "*.npz"))):
            r = subprocess.run([sys.executable, __file__, f], capture_output=True, text=True)
            print((r.stdout + r.stderr[-160:]).strip() if not r.returncode else os.path.basename(f) + ": " + r.stderr.strip()[-100:], flush=True)
