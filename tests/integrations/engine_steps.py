"""Steps as vLLM describes them: its layouts, a padded request, prefixes, shuffled pages, garbage wherever no token lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3attn.dtypes import is_fp8

PAGE = 128
GARBAGE_PAGE = 1 << 20


@dataclass(frozen=True)
class EngineStep:
    """`q_lens` and `seq_lens` on the host, everything else as the engine passes it; scales are None with a 16-bit cache."""

    q_lens: list[int]
    seq_lens: list[int]
    q: torch.Tensor
    index_q: torch.Tensor
    kv: torch.Tensor
    index_k: torch.Tensor
    table: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def heads(self) -> int:
        return self.kv.shape[1]

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @property
    def lengths(self) -> torch.Tensor:
        return self.ints(self.seq_lens)

    @property
    def prefixes(self) -> torch.Tensor:
        return self.ints([n - q for n, q in zip(self.seq_lens, self.q_lens, strict=True)])

    @property
    def offsets(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.ints(self.q_lens).cumsum(0), (1, 0)).int()

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(request, position) of each query row."""
        return [(b, n - q + i) for b, (q, n) in enumerate(zip(self.q_lens, self.seq_lens, strict=True)) for i in range(q)]

    def tokens(self, cache: torch.Tensor) -> list[torch.Tensor]:
        """Each request's tokens in a cache [pages, ..., 128, dim], as [..., seq_len, dim] fp64."""
        found = []
        for request, length in enumerate(self.seq_lens):
            pages = self.table[request, : -(-length // PAGE)].long()
            own = cache.view(torch.uint8)[pages].view(cache.dtype) if is_fp8(cache.dtype) else cache[pages]
            found.append(own.double().movedim(0, -3).flatten(-3, -2)[..., :length, :])
        return found

    def scores(self) -> torch.Tensor:
        """Exact index scores [Hi, T, blocks] fp64, -inf where a block has no visible position."""
        out = torch.full((self.heads, len(self.rows), -(-self.max_seq_len // PAGE)), float("-inf"), dtype=torch.float64, device=self.device)
        keys = self.tokens(self.index_k)
        for row, (request, position) in enumerate(self.rows):
            if position >= 0:
                products = self.index_q[row].double() @ keys[request][: position + 1].T
                padded = torch.nn.functional.pad(products, (0, -products.shape[1] % PAGE), value=float("-inf"))
                best = padded.unflatten(1, (-1, PAGE)).amax(2)
                out[:, row, : best.shape[1]] = best
        return out

    def attention(self, ids: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """Exact attention over the blocks `ids` [Hkv, T, K], fp64; a row that sees no key is 0."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.device)
        dim, group = self.kv.shape[3] // 2, self.q.shape[1] // self.heads
        k_scale, v_scale = (1.0 if s is None else float(s) for s in (self.k_scale, self.v_scale))
        tokens = self.tokens(self.kv)
        for row, (request, position) in enumerate(self.rows):
            if position < 0:
                continue
            cached = tokens[request][:, : position + 1]
            for head in range(self.heads):
                kept = torch.isin(torch.arange(position + 1, device=self.device) // PAGE, ids[head, row].long())
                k, v = cached[head, kept, :dim] * k_scale, cached[head, kept, dim:] * v_scale
                queries = slice(head * group, (head + 1) * group)
                weights = (self.q[row, queries].double() @ k.T * sm_scale).softmax(-1)
                out[row, queries] = weights @ v
        return out


def engine_step(
    q_lens: list[int],
    seq_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None,
    layout: str = "HND",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> EngineStep:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    (num_q, num_kv), dim, tokens = heads, 128, sum(q_lens)
    needed = [-(-n // PAGE) for n in seq_lens]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    num_pages = len(order)
    table = torch.full((len(q_lens), max(needed) + 3), GARBAGE_PAGE, dtype=torch.int32)
    kv, index_k = torch.full((num_pages, num_kv, PAGE, 2 * dim), float("nan")), torch.full((num_pages, PAGE, dim), float("nan"))
    fp8 = cache_dtype is not None and is_fp8(cache_dtype)
    k_scale, v_scale = (torch.tensor([0.5]), torch.tensor([2.0])) if fp8 else (None, None)
    for request, (pages, length) in enumerate(zip(needed, seq_lens, strict=True)):
        for page in range(pages):
            own = order.pop()
            table[request, page] = own
            live = min(PAGE, length - page * PAGE)
            kv[own, :, :live], index_k[own, :live] = randn(num_kv, live, 2 * dim), randn(live, dim)
    kv, index_k = kv.to(device=device, dtype=cache_dtype or dtype), index_k.to(device=device, dtype=index_dtype or dtype)
    if layout == "NHD":
        kv = kv.transpose(1, 2).contiguous().transpose(1, 2)
    q, index_q = randn(tokens, num_q, dim).to(device=device, dtype=dtype), randn(tokens, num_kv, dim).to(device=device, dtype=index_dtype or dtype)
    scales = [None if s is None else s.to(device) for s in (k_scale, v_scale)]
    return EngineStep(q_lens, seq_lens, q, index_q, kv, index_k, table.to(device), *scales)
