"""PTX text -> Module / Kernel / Instr."""

import re
import struct


class PtxError(Exception):
    """Text that is not PTX, or PTX that this parser does not know."""


_TYPES_OF_SIZE = {
    0: "pred",
    1: "b8 u8 s8",
    2: "b16 u16 s16 f16 bf16",
    4: "b32 u32 s32 f32 f16x2 bf16x2",
    8: "b64 u64 s64 f64 f32x2",
    16: "b128",
}
TYPE_SIZE = {name: size for size, names in _TYPES_OF_SIZE.items() for name in names.split()}


class Reg:
    """A register: its name, PTX type and number; how it is stored follows from its uses (`fvotes` as fp32, `ivotes` as anything else)."""

    __slots__ = ("fvotes", "idx", "ivotes", "name", "storage", "type")

    def __init__(self, name, type_, idx):
        self.name, self.type, self.idx = name, type_, idx
        self.fvotes = self.ivotes = 0
        self.storage = None


class Instr:
    """An instruction: `op` and its `parts` between dots, operands `args`, predicate `pred` (inverted if `pneg`), line and text."""

    __slots__ = ("args", "line", "op", "parts", "pneg", "pred", "scopes", "text")

    def __repr__(self):
        return f"line {self.line}: {self.text}"


class Kernel:
    """An entry: parameters, registers, instructions, labels, symbols declared inside."""

    def __init__(self, name):
        self.name = name
        self.params = []  # (name, size, offset)
        self.param_offsets = {}
        self.param_bytes = 0
        self.regs = []
        self.instrs = []
        self.labels = {}  # unique label -> instr index
        self.symbols = {}  # shared/local symbols declared inside: name -> (space, size, align)
        self.reqntid = None


class Module:
    """A parsed PTX file: `kernels` by name, and symbols at file scope."""

    def __init__(self, text):
        self.text = text
        self.kernels = {}
        self.symbols = {}  # name -> (space, size, align, init)
        self.target = None
        _parse(self, text)


# operands: ("r", Reg) ("i", int) ("f", bits, width) ("s", symbol) ("m", base_operand, offset)
#           ("v", [ops]) ("p", a, b) pair a|b  ("mt", base_operand, offset, [coords]) ("l", label) ("n", operand) negated pred
#           ("_",) sink
_num = re.compile(r"^-?(0[xX][0-9a-fA-F]+|\d+)U?$")


def _split_top(s):
    """Split at the commas outside all brackets."""
    out, depth, cur = [], 0, []
    for ch in s:
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        if ch == "," and depth == 0:
            out.append("".join(cur).strip())
            cur = []
        else:
            cur.append(ch)
    last = "".join(cur).strip()
    if last:
        out.append(last)
    return out


class _FnParser:
    """Parses one body, statement by statement, with the scopes of its braces."""

    def __init__(self, kern, module):
        self.k, self.m = kern, module
        self.scopes = [({}, 0)]
        self.num_scopes = 1

    def find(self, name):
        for d, _ in reversed(self.scopes):
            if name in d:
                return d[name]
        return None

    def declare(self, type_, names):
        d = self.scopes[-1][0]
        for n in names:
            n = n.strip()
            mm = re.match(r"^(.*)<(\d+)>$", n)
            lst = [f"{mm.group(1)}{i}" for i in range(int(mm.group(2)))] if mm else [n]
            for x in lst:
                r = Reg(x, type_, len(self.k.regs))
                self.k.regs.append(r)
                d[x] = r

    def operand(self, s):
        s = s.strip()
        if s == "_":
            return ("_",)
        if s[0] == "{":
            return ("v", [self.operand(x) for x in _split_top(s[1:-1])])
        if s[0] == "[":
            inner = s[1:-1].strip()
            if "," in inner:  # tensor coordinate form [base, {..}] (possibly a third part)
                parts = _split_top(inner)
                b = self.operand("[" + parts[0] + "]")
                return ("mt", b[1], b[2], [self.operand(p) for p in parts[1:]])
            mm = re.match(r"^(.+?)\s*\+\s*(-?(?:0[xX][0-9a-fA-F]+|\d+))$", inner)
            if mm:
                return ("m", self.operand(mm.group(1)), int(mm.group(2), 0))
            mm = re.match(r"^(.+?)\s*-\s*(\d+)$", inner)
            if mm and not _num.match(inner):
                return ("m", self.operand(mm.group(1)), -int(mm.group(2)))
            return ("m", self.operand(inner), 0)
        if "|" in s:
            a, b = s.split("|")
            return ("p", self.operand(a), self.operand(b))
        if s[0] == "!":
            return ("n", self.operand(s[1:]))
        r = self.find(s)
        if r is not None:
            return ("v", [("r", x) for x in r]) if isinstance(r, list) else ("r", r)
        if _num.match(s):
            return ("i", int(s.rstrip("U"), 0))
        if s[:2] in ("0f", "0F") and len(s) == 10:
            return ("f", int(s[2:], 16), 32)
        if s[:2] in ("0d", "0D") and len(s) == 18:
            return ("f", int(s[2:], 16), 64)
        if s[:1] == "-" and self.find(s[1:]):
            raise PtxError("negated register operand: " + s)
        mm = re.match(r"^([\w$%.]+)\s*\+\s*(-?\d+)$", s)
        if mm and self.find(mm.group(1)) is None:
            return ("so", mm.group(1), int(mm.group(2)))
        mm = re.match(r"^-?\d+\.\d*$", s)
        if mm:
            return ("f", struct.unpack("<I", struct.pack("<f", float(s)))[0], 32)
        return ("s", s)

    def statement(self, text, line):
        text = text.strip()
        if not text:
            return
        if text.startswith(".reg"):
            body = text[4:].strip()
            mm = re.match(r"^\.(?:v(\d)\s+\.)?(\w+)\s+(.*)$", body, re.S)
            names = [x.strip() for x in mm.group(3).split(",")]
            if mm.group(1):  # vector registers: name.x, name.y, ...
                n = int(mm.group(1))
                for x in names:
                    self.declare(mm.group(2), [f"{x}.{c}" for c in "xyzw"[:n]])
                    d = self.scopes[-1][0]
                    d[x] = [d[f"{x}.{c}"] for c in "xyzw"[:n]]
            else:
                self.declare(mm.group(2), names)
            return
        if text.startswith((".pragma", ".loc", ".branchtargets")):
            return
        mm = re.match(r"^\.(shared|local|const|global|param)\b", text)
        if mm:
            _decl_symbol(self.k.symbols, text)
            return
        if text.startswith("."):
            raise PtxError(f"unsupported directive at line {line}: {text[:80]}")
        i = Instr()
        i.line, i.text = line, " ".join(text.split())
        i.pred, i.pneg = None, False
        t = i.text
        if t[0] == "@":
            ps, t = t[1:].split(None, 1)
            if ps[0] == "!":
                i.pneg, ps = True, ps[1:]
            i.pred = self.find(ps)
            if i.pred is None:
                raise PtxError(f"unknown predicate {ps} at line {line}")
        sp = t.split(None, 1)
        i.op = sp[0]
        i.parts = i.op.split(".")
        rest = sp[1] if len(sp) > 1 else ""
        i.scopes = tuple(s[1] for s in self.scopes)
        if i.parts[0] == "call":
            i.args = [("s", rest)]
        else:
            i.args = [self.operand(x) for x in _split_top(rest)]
        self.k.instrs.append(i)

    def label(self, name):
        self.k.labels[(self.scopes[-1][1], name)] = len(self.k.instrs)


def _decl_symbol(table, text):
    """Enter the variable that `text` declares."""
    mm = re.match(r"^(?:\.visible\s+|\.extern\s+|\.weak\s+)*\.(shared|local|const|global|param)\s+(.*)$", text, re.S)
    if not mm:
        return
    space, body = mm.group(1), mm.group(2)
    align = 1
    am = re.search(r"\.align\s+(\d+)", body)
    if am:
        align = int(am.group(1))
    init = None
    if "=" in body:
        body, init = body.split("=", 1)
    dm = re.search(r"\.(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64|b128)\s+([\w$%.]+)\s*((?:\[\d*\])*)", body)
    if not dm:
        raise PtxError("cannot parse declaration: " + text[:120])
    es = TYPE_SIZE[dm.group(1)]
    n = 1
    ext = False
    for d in re.findall(r"\[(\d*)\]", dm.group(3)):
        if d == "":
            ext = True
            n = 0
        else:
            n *= int(d)
    raw = None
    if init is not None:
        vals = re.findall(r"-?0[xX][0-9a-fA-F]+|-?\d+", init)
        raw = b"".join((int(v, 0) & ((1 << (8 * es)) - 1)).to_bytes(es, "little") for v in vals)
        raw = raw.ljust(n * es, b"\0")
    table[dm.group(2)] = (space, n * es, max(align, es), ext or ".extern" in text, raw)


def _strip(text):
    """Lines without comments and debug information; their numbers stay."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
    lines = []
    for ln in text.split("\n"):
        j = ln.find("//")
        if j >= 0:
            ln = ln[:j]
        st = ln.strip()
        if st.startswith((".loc", ".file", ".section", "@@DWARF")):
            ln = ""
        lines.append(ln)
    return lines


def _parse(mod, text):
    lines = _strip(text)
    # drop .section { ... } bodies (debug info) -- they come after the code
    n, li = len(lines), 0
    while li < n:
        ln = lines[li].strip()
        if ln.startswith((".version", ".address_size")) or not ln:
            li += 1
            continue
        if ln.startswith(".target"):
            mod.target = ln.split()[1].rstrip(",")
            li += 1
            continue
        if re.match(r"^(\.visible\s+|\.weak\s+|\.extern\s+)*\.(entry|func)\b", ln):
            # header up to '{' or ';'
            hdr = []
            while True:
                t = lines[li]
                if "{" in t or (";" in t):
                    break
                hdr.append(t)
                li += 1
            t = lines[li]
            if ";" in t and "{" not in t:
                li += 1
                continue  # prototype
            cut = t.index("{")
            hdr.append(t[:cut])
            lines[li] = t[cut:]
            h = "\n".join(hdr)
            is_entry = ".entry" in h
            nm = re.search(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$%.]+)", h).group(1)
            k = Kernel(nm)
            off = 0
            pm = re.search(re.escape(nm) + r"\s*\((.*?)\)\s*(?:\.|$)", h, re.S)
            if pm and is_entry:
                for p in _split_top(pm.group(1)):
                    a = re.search(r"\.align\s+(\d+)", p)
                    nm2 = re.search(r"([\w$%]+)\s*(?:\[(\d+)\])?\s*$", p)
                    ty = re.search(r"\.(b8|u8|s8|b16|u16|s16|f16|b32|u32|s32|f32|b64|u64|s64|f64)\b", p).group(1)
                    es = TYPE_SIZE[ty]
                    cnt = int(nm2.group(2)) if nm2.group(2) else 1
                    al = max(int(a.group(1)) if a else 1, es)
                    off = (off + al - 1) // al * al
                    k.params.append((nm2.group(1), es * cnt, off))
                    k.param_offsets[nm2.group(1)] = off
                    off += es * cnt
            k.param_bytes = off
            rm = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", h)
            if rm:
                k.reqntid = tuple(int(x) if x else 1 for x in rm.groups())
            li = _parse_body(mod, k, lines, li)
            if is_entry:
                mod.kernels[nm] = k
            continue
        # module-scope declaration
        st = ln
        while ";" not in st and li + 1 < n:
            li += 1
            st += " " + lines[li].strip()
        if re.search(r"\.(shared|const|global)\b", st):
            _decl_symbol(mod.symbols, st.split(";")[0])
        li += 1


_lab = re.compile(r"^\s*([A-Za-z_$%][\w$%]*)\s*:(?!:)")


def _parse_body(mod, k, lines, li):
    """Parse from the line of the opening brace; the line after the closing one."""
    fp = _FnParser(k, mod)
    depth = 0
    buf, bufline = "", None
    n = len(lines)
    while li < n:
        s = lines[li]
        i = 0
        while i < len(s):
            ch = s[i]
            if not buf:
                if ch.isspace():
                    i += 1
                    continue
                if ch == "{":
                    depth += 1
                    if depth > 1:
                        fp.scopes.append(({}, fp.num_scopes))
                        fp.num_scopes += 1
                    i += 1
                    continue
                if ch == "}":
                    depth -= 1
                    if depth == 0:
                        return li + 1
                    fp.scopes.pop()
                    i += 1
                    continue
                if ch == ";":
                    i += 1
                    continue
                m = _lab.match(s[i:])
                if m:
                    fp.label(m.group(1))
                    i += m.end()
                    continue
                bufline = li + 1
            if ch == ";":
                fp.statement(buf, bufline)
                buf = ""
            else:
                buf += ch
            i += 1
        if buf:
            buf += " "
        li += 1
    raise PtxError("unterminated function " + k.name)
