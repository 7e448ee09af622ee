"""Sparse attention for decode and verify on SM90: a tile of neighbouring tokens reads the union of its blocks once. docs/cute_sparse_decode.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import Arch, BaseDSL

from m3attn.calls import SparseAttentionCall
from m3attn.choice import UnsupportedProblem
from m3attn.dsl_kernels import decode_schedule, finish_rows, merge_splits_sm90, warp_mma
from m3attn.dsl_kernels.common.kernels import CuteKernel
from m3attn.dsl_kernels.decode_schedule import BLOCK, HEAD_DIM, MMA_ROWS, power_of_2, schedule_of, settings_override
from m3attn.dsl_kernels.decode_schedule import decode_workspace_bytes as decode_workspace_bytes
from m3attn.dsl_kernels.finish_rows import LOG2E, MINUS_INF, finish_row, load_scale, sink_logit
from m3attn.dsl_kernels.merge_splits_sm90 import MergeSplits, partials
from m3attn.dsl_kernels.warp_mma import as_halves, interleave_rows, load_transposed, mma_atom, shared_tensor, swizzled, widen_pair
from m3attn.dtypes import dtype_name, is_fp8
from m3attn.workspace import workspace_limit

MMA_KEYS = 16
K_STEPS = HEAD_DIM // 16
D_TILES = HEAD_DIM // 8
WARP = 32
MAX_ROWS_AT_ONCE = 4  # that a warp joins, so that it waits for memory once
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40  # where both are whole warpgroups
NONE = 2**31 - 1  # no block
BLOCK_BITS = 16  # of an id
OUT_PITCH = HEAD_DIM + 8  # floats; a half warp's 8-byte stores then fall into different banks
READERS = 1  # named barrier of the consumer warps
ELEMENTS = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32, "fp8_e4m3": Uint8, "fp8_e5m2": Uint8}


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel depends on. Lengths, batch, heads, strides and the number of splits are run-time values.

    Attributes:
        tokens: query tokens of a tile, a power of two.
        token_rows: rows of a token, its group padded to a power of two; tokens * token_rows is a multiple of 16.
        max_topk: K, rounded up to 16, 32 or 64.
        key_warps: warps that share the keys of a step.
        step_keys: keys of a pipeline step.
        stages: steps in flight.
        splits: 1, or the splits rounded up to a power of two; then partial results go through the workspace to `MergeSplits`.
        sink: element type of sink_key, or `none`.
        q_scale, k_scale, v_scale: whether the scale has a tensor.
        aligned: rows of q and out start at multiples of 16 bytes.
    """

    q_dtype: str
    kv_dtype: str
    tokens: int
    token_rows: int
    max_topk: int
    key_warps: int
    step_keys: int
    stages: int
    splits: int
    lse: bool = False
    sink: str = "none"
    q_scale: bool = False
    k_scale: bool = False
    v_scale: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class RowTile:
    """The query rows of a CTA, as the device finds them: row first_row + t has position first_position + t."""

    request: Int32
    first_row: Int32
    num_tokens: Int32
    first_position: Int32

    @cute.jit
    def visible(self, token: Int32) -> Int32:
        """Keys that a token sees; 0 for a token that is not there."""
        seen = cutlass.max(self.first_position + token + 1, 0)
        return seen if token < self.num_tokens else Int32(0)


@dataclass(frozen=True)
class Share:
    """A CTA's part of the work: a KV head, and step `split` of every `splits`."""

    kv_head: Int32
    split: Int32
    splits: Int32


@dataclass(frozen=True)
class Heads:
    """The query heads of a KV head: first, …, first + group - 1."""

    first: Int32
    group: Int32


@dataclass(frozen=True)
class BlockList:
    """The union in shared memory: entry e is a block, its page, and its tokens as bits. `ids` and `keys` are what it is made from."""

    ids: cute.Tensor  # [tokens * K]
    keys: cute.Tensor
    blocks: cute.Tensor
    pages: cute.Tensor
    members: cute.Tensor
    length: cute.Tensor  # [1]


@dataclass(frozen=True)
class Stages:
    """The pipeline in shared memory: keys of all stages, then values, and three barriers a stage."""

    buffer: cute.Pointer
    k_full: cute.Pointer
    v_full: cute.Pointer
    empty: cute.Pointer


@dataclass(frozen=True)
class Statistics:
    """Maximum and sum of each row's softmax, [key warps, rows] in shared memory."""

    largest: cute.Tensor
    total: cute.Tensor


@dataclass(frozen=True)
class Results:
    """Where a CTA's rows go, and what they need on the way there."""

    mQ: cute.Tensor
    mSink: Any
    mOut: cute.Tensor
    mLse: Any
    q_factor: Float32
    v_factor: Float32


class SparseDecode:
    """One CTA: a tile of tokens, one KV head, one of several equal runs of the union's steps.

    A warp has 16 rows (at G 16 one token's heads) and `step_keys / key_warps` keys of each step. It skips blocks that none of its tokens
    picked: the tile loads the union, a token multiplies with its own blocks alone.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.q_type, self.kv_type = ELEMENTS[variant.q_dtype], ELEMENTS[variant.kv_dtype]
        self.is_fp8 = self.kv_type is Uint8
        self.mma_type = Float16 if self.is_fp8 else self.kv_type
        # bf16 spans more powers of two than fp16: its rows are scaled to start near 1.
        self.normalise_q = self.is_fp8 and self.q_type is BFloat16
        self.rows = variant.tokens * variant.token_rows
        self.row_warps = self.rows // MMA_ROWS
        self.readers = self.row_warps * variant.key_warps
        # Nine warps would have 168 registers each. Beside a warpgroup of producers, of which one works, eight have room for more keys at a time.
        self.is_wide = self.readers == 8
        self.threads = (self.readers + (4 if self.is_wide else 1)) * WARP
        self.warp_keys = variant.step_keys // variant.key_warps
        self.part_keys = min(self.warp_keys, 64 if self.is_wide else 32)
        self.key_tiles = self.part_keys // 8
        self.rows_at_once = min(MAX_ROWS_AT_ONCE, self.rows // self.readers)
        self.block_steps = BLOCK // variant.step_keys
        self.boxes = HEAD_DIM * self.kv_type.width // 8 // warp_mma.SWIZZLE_BYTES
        self.box_bytes = variant.step_keys * warp_mma.SWIZZLE_BYTES
        self.tile_bytes = self.boxes * self.box_bytes
        self.num_ids = variant.tokens * variant.max_topk
        out_bytes = variant.key_warps * self.rows * OUT_PITCH * 4
        self.buffer_bytes = max(2 * variant.stages * self.tile_bytes, out_bytes)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [T, Hq, D]
        mK: cute.Tensor,  # [pages, Hkv, page_size, D]
        mV: cute.Tensor,  # [pages, Hkv, page_size, D]
        mIds: cute.Tensor,  # [Hkv, T, K]
        mPageTable: cute.Tensor,  # [B, max_pages]
        mSeqLens: cute.Tensor,  # [B]
        mCuSeqlens: cute.Tensor,  # [B + 1]
        mSink: Any,  # [Hq, D] or None
        mOut: cute.Tensor,  # [T, Hq, D]
        mLse: Any,  # [T, Hq] or None
        mWork: Any,  # [bytes], scratch for the partials, or None
        mQScale: Any,  # [1] or None
        mKScale: Any,
        mVScale: Any,
        sm_scale: Float32,
        q_scale: Float32,
        k_scale: Float32,
        v_scale: Float32,
        max_seqlen_q: Int32,
        max_seqlen_k: Int32,
        splits: Int32,
        stream: Any,
    ) -> None:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.kv_type)
        s_layout = cute.tile_to_shape(atom, (self.variant.step_keys, HEAD_DIM, self.variant.stages), order=(0, 1, 2))
        mK, mV = (cute.make_tensor(m.iterator, cute.select(m.layout, mode=[2, 3, 1, 0])) for m in (mK, mV))
        load = cpasync.CopyBulkTensorTileG2SOp()
        box = (self.variant.step_keys, HEAD_DIM)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, mK, cute.slice_(s_layout, (None, None, 0)), box)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, mV, cute.slice_(s_layout, (None, None, 0)), box)
        tiles = cute.ceil_div(max_seqlen_q, self.variant.tokens) * mSeqLens.shape[0]
        # For SM100 ptxas needs more than the 168 registers of two CTAs a multiprocessor.
        spills = self.is_fp8 and BaseDSL._get_dsl().get_arch_enum() >= Arch.sm_100a
        mToOut, mToLse, mToSink = mOut, mLse, mSink
        if const_expr(self.variant.splits > 1):
            (mToOut, mToLse), mToSink = partials(mWork, splits, mOut), None
        self.kernel(
            mQ,
            tma_k,
            mK,
            tma_v,
            mV,
            mIds,
            mPageTable,
            mSeqLens,
            mCuSeqlens,
            mToSink,
            mToOut,
            mToLse,
            mQScale,
            mKScale,
            mVScale,
            sm_scale,
            q_scale,
            k_scale,
            v_scale,
            max_seqlen_q,
            max_seqlen_k,
            splits,
            s_layout,
        ).launch(
            grid=(tiles, mIds.shape[0], splits),
            block=(self.threads, 1, 1),
            stream=stream,
            # Without the first ptxas takes what registers it likes, and does not give them from warpgroup to warpgroup.
            min_blocks_per_mp=1 if self.is_wide or spills else 2,
            preferred_smem_carveout=100,
            use_pdl=True,
        )
        if const_expr(self.variant.splits > 1):
            merge = MergeSplits(self.variant.splits)
            merge.launch(mToOut, mToLse, mQ, mSink, mOut, mLse, mQScale, mVScale, sm_scale, q_scale, v_scale, stream)

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,  # [page_size, D, Hkv, pages]
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        mIds: cute.Tensor,
        mPageTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mSink: Any,
        mOut: cute.Tensor,  # [T, Hq, D]; with splits [splits, T, Hq, D] fp32
        mLse: Any,  # [T, Hq] or None; with splits [splits, T, Hq]
        mQScale: Any,
        mKScale: Any,
        mVScale: Any,
        sm_scale: Float32,
        q_scale: Float32,
        k_scale: Float32,
        v_scale: Float32,
        max_seqlen_q: Int32,
        max_seqlen_k: Int32,
        splits: Int32,
        s_layout: cute.ComposedLayout,
    ) -> None:
        variant = self.variant
        tile, kv_head, split = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()

        smem = cutlass.memory.SmemAllocator()
        stages = Stages(smem.allocate(self.buffer_bytes, 1024), *(smem.allocate_array(cutlass.Int64, variant.stages) for _ in range(3)))
        ids, keys, distinct, pages, members = (smem.allocate_tensor(Int32, cute.make_layout(self.num_ids), warp_mma.CHUNK_BYTES) for _ in range(5))
        blocks = BlockList(ids, keys, distinct, pages, members, smem.allocate_tensor(Int32, cute.make_layout(1), 4))
        per_row = cute.make_layout((variant.key_warps, self.rows))
        statistics = Statistics(*(smem.allocate_tensor(Float32, per_row, 4) for _ in range(2)))

        if thread == 0:
            for stage in cutlass.range_constexpr(variant.stages):
                cute.arch.mbarrier_init(stages.k_full + stage, 1)
                cute.arch.mbarrier_init(stages.v_full + stage, 1)
                cute.arch.mbarrier_init(stages.empty + stage, self.readers)
            cute.arch.mbarrier_init_fence()
        if warp == self.readers:
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)
        # Starts beside the kernel that writes q or ids and waits for it here; the merge starts beside this one and waits for all of it.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        tiles_a_request = cute.ceil_div(max_seqlen_q, variant.tokens)
        request, part = tile // tiles_a_request, tile % tiles_a_request
        share = Share(kv_head, split, splits)
        guess = request * max_seqlen_q + part * variant.tokens
        rIds = self.guess_ids(mIds, kv_head, guess, thread)
        rows = self.find_rows(mCuSeqlens, mSeqLens, mIds.shape[1], request, part, max_seqlen_k)
        mToOut, mToLse = mOut, mLse
        if const_expr(variant.splits > 1):
            mToOut, mToLse = mOut[split, None, None, None], mLse[split, None, None]
        self.clear_padded_rows(mToOut, mToLse, mCuSeqlens, mSeqLens.shape[0], tile, self.heads(mQ, mIds, kv_head), thread)
        if rows.num_tokens > 0:
            self.unite(blocks, mIds, mPageTable, mK.shape[3], rows, rows.first_row == guess, rIds, kv_head, thread)
            steps = self.num_steps(blocks, rows)
            if warp >= self.readers:
                if const_expr(self.is_wide):
                    cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == self.readers:
                    self.load(stages, tma_k, mK, tma_v, mV, s_layout, blocks, share, steps)
            else:
                if const_expr(self.is_wide):
                    cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                q_factor = sm_scale * load_scale(q_scale, mQScale)
                factor = q_factor * load_scale(k_scale, mKScale) * LOG2E
                heads = self.heads(mQ, mIds, kv_head)
                self.attend(mQ, rows, heads, share, factor, stages, blocks, statistics, steps, warp, lane)
                to = Results(mQ, mSink, mOut, mLse, q_factor, load_scale(v_scale, mVScale))
                self.store_rows(to, rows, heads, split, self.out_tile(stages.buffer), statistics, warp, lane)

    def heads(self, mQ: cute.Tensor, mIds: cute.Tensor, kv_head: Int32) -> Heads:
        group = mQ.shape[1] // mIds.shape[0]
        return Heads(kv_head * group, group)

    @cute.jit
    def store_rows(
        self, to: Results, rows: RowTile, heads: Heads, split: Int32, sOut: cute.Tensor, statistics: Statistics, warp: Int32, lane: Int32
    ) -> None:
        """Every n-th row of the tile, n being the warps: joined, then to the outputs or to the split's partials."""
        variant = self.variant
        for start in cutlass.range(warp, self.rows, self.readers * self.rows_at_once, unroll=1):
            rOut = cute.make_rmem_tensor((finish_rows.LANE_DIMS, self.rows_at_once), Float32)
            rMax, rSum, rSink = (cute.make_rmem_tensor(self.rows_at_once, Float32) for _ in range(3))
            for i in cutlass.range_constexpr(self.rows_at_once):
                row = start + i * self.readers
                output, rMax[i], rSum[i] = self.join_key_warps(sOut, statistics, row, lane)
                for j in cutlass.range_constexpr(finish_rows.LANE_DIMS):
                    rOut[j, i] = output[j]
                if const_expr(to.mSink is not None):
                    token = cutlass.min(row // variant.token_rows, rows.num_tokens - 1)
                    head = heads.first + cutlass.min(row % variant.token_rows, heads.group - 1)
                    rSink[i] = sink_logit(to.mQ, to.mSink, rows.first_row + token, head, lane) * to.q_factor
            for i in cutlass.range_constexpr(self.rows_at_once):
                row = start + i * self.readers
                token, head = row // variant.token_rows, row % variant.token_rows
                if token < rows.num_tokens and head < heads.group:
                    token += rows.first_row
                    head += heads.first
                    if const_expr(variant.splits > 1):
                        self.store_partial(rOut[None, i], rMax[i], rSum[i], to.mOut, to.mLse, split, token, head, lane)
                    else:
                        sink = None if const_expr(to.mSink is None) else rSink[i]
                        finish_row(rOut[None, i], rMax[i], rSum[i], sink, to.v_factor, to.mOut, to.mLse, token, head, lane)

    @cute.jit
    def find_rows(self, mCuSeqlens: cute.Tensor, mSeqLens: cute.Tensor, num_rows: Int32, request: Int32, part: Int32, max_seqlen_k: Int32) -> RowTile:
        """Tile `part` of a request's rows; whatever stands in the offsets, the rows lie within the tensors."""
        begin, end = mCuSeqlens[request], mCuSeqlens[request + 1]
        seq_len = cutlass.min(cutlass.max(mSeqLens[request], 0), max_seqlen_k)
        first_row = cutlass.min(cutlass.max(begin, 0), num_rows) + part * self.variant.tokens
        num_tokens = cutlass.min(cutlass.min(cutlass.max(end, 0), num_rows) - first_row, self.variant.tokens)
        return RowTile(request, first_row, num_tokens, seq_len - end + first_row)

    @cute.jit
    def guess_ids(self, mIds: cute.Tensor, kv_head: Int32, first_row: Int32, thread: Int32) -> cute.Tensor:
        """The thread's ids of the tile if all requests have max_seqlen_q queries: asked for before the offsets have come."""
        rIds = cute.make_rmem_tensor(cute.ceil_div(self.num_ids, self.threads), Int32)
        for i in cutlass.range_constexpr(cute.size(rIds)):
            token, k = (thread + i * self.threads) // self.variant.max_topk, (thread + i * self.threads) % self.variant.max_topk
            rIds[i] = mIds[kv_head, cutlass.min(first_row + token, mIds.shape[1] - 1), cutlass.min(k, mIds.shape[2] - 1)]
        return rIds

    @cute.jit
    def unite(
        self,
        to: BlockList,
        mIds: cute.Tensor,
        mPageTable: cute.Tensor,
        num_pages: Int32,
        rows: RowTile,
        guessed: Boolean,
        rIds: cute.Tensor,
        kv_head: Int32,
        thread: Int32,
    ) -> None:
        """The tile's distinct blocks with page and tokens (bit t: token t picked it): a thread an id, ranked by comparison.

        Blocks of one token are ascending; else those of more tokens come first. All warps work on those, and when the stages hold blocks of few
        tokens, no warp is likely to have picked all of them while the others wait. Ids may stand in any order. One that stands twice in a row leaves
        an entry without tokens behind.
        """
        variant, num_ids = self.variant, self.num_ids
        rPages, rMembers = cute.make_rmem_tensor_like(rIds), cute.make_rmem_tensor_like(rIds)
        for i in cutlass.range_constexpr(cute.size(rIds)):
            entry = thread + i * self.threads
            token, k = entry // variant.max_topk, entry % variant.max_topk
            block = Int32(NONE)
            rPages[i] = Int32(0)
            if entry < num_ids and token < rows.num_tokens and k < mIds.shape[2]:
                block = rIds[i]
                if not guessed:
                    block = mIds[kv_head, rows.first_row + token, k]
                if block < 0 or block >= cutlass.min(cute.ceil_div(rows.visible(token), BLOCK), mPageTable.shape[1]):
                    block = Int32(NONE)
                else:
                    rPages[i] = mPageTable[rows.request, block]
            rIds[i] = block
            rMembers[i] = Int32(block != NONE)
            if entry < num_ids:
                to.ids[entry], to.blocks[entry], to.pages[entry], to.members[entry] = block, Int32(0), Int32(0), Int32(0)
        cute.arch.sync_threads()

        sRanked, rKeys = to.ids, rIds
        if const_expr(variant.tokens > 1):
            sRanked, rKeys = to.keys, cute.make_rmem_tensor_like(rIds)
            for i in cutlass.range_constexpr(cute.size(rIds)):
                entry = thread + i * self.threads
                if entry < num_ids:
                    members = Int32(0)
                    for token in cutlass.range(variant.tokens, unroll=2):
                        found = Boolean(False)
                        for k in cutlass.range_constexpr(0, variant.max_topk, 4):
                            ids = self.four_at(to.ids, token * variant.max_topk + k)
                            for j in cutlass.range_constexpr(4):
                                found = found or ids[j] == rIds[i]
                        members |= Int32(found) << token
                    # Of the tokens that picked a block the first keeps it.
                    is_first = rIds[i] != NONE and (members & ((1 << (entry // variant.max_topk)) - 1)) == 0
                    rMembers[i] = members if is_first else Int32(0)
                    rKeys[i] = ((variant.tokens - cute.arch.popc(members)) << BLOCK_BITS) + rIds[i] if is_first else Int32(NONE)
                    to.keys[entry] = rKeys[i]
            cute.arch.sync_threads()

        for i in cutlass.range_constexpr(cute.size(rIds)):
            if thread + i * self.threads < num_ids:
                rank, length = Int32(0), Int32(0)
                for start in cutlass.range(0, num_ids, 16, unroll=1):
                    for j in cutlass.range_constexpr(0, 16, 4):
                        ids = self.four_at(sRanked, start + j)
                        for m in cutlass.range_constexpr(4):
                            rank += Int32(ids[m] < rKeys[i])
                            length += Int32(ids[m] != NONE)
                if rMembers[i] != 0:
                    page = cutlass.min(cutlass.max(rPages[i], 0), num_pages - 1)
                    to.blocks[rank], to.pages[rank], to.members[rank] = rIds[i], page, rMembers[i]
                if const_expr(i == 0):
                    if thread == 0:
                        to.length[0] = length
        cute.arch.sync_threads()

    def four_at(self, tensor: cute.Tensor, index: Any) -> cute.Tensor:
        """Elements index to index + 3 of a list in shared memory, in registers; index is a multiple of 4."""
        four = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(shared_tensor(Int32, tensor.iterator.toint() + index * 4, 4), four)
        return four

    @cute.jit
    def num_steps(self, union: BlockList, rows: RowTile) -> Int32:
        """Pipeline steps of the union. Of one token, keys behind the last visible one, which lie in its last block, are not loaded."""
        length = union.length[0]
        steps = length * self.block_steps
        if const_expr(self.variant.tokens == 1):
            if length > 0:
                keys = rows.visible(0) - union.blocks[length - 1] * BLOCK
                steps += cutlass.min(cute.ceil_div(keys, self.variant.step_keys) - self.block_steps, 0)
        return steps

    @cute.jit
    def load(
        self,
        stages: Stages,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        s_layout: cute.ComposedLayout,
        union: BlockList,
        share: Share,
        steps: Int32,
    ) -> None:
        """The producer warp: one TMA tile of K and one of V a step that somebody reads, as far ahead as there are stages."""
        variant, parts = self.variant, []
        for tma, m, offset in ((tma_k, mK, 0), (tma_v, mV, variant.stages * self.tile_bytes)):
            pointer = cute.recast_ptr(stages.buffer + offset, s_layout.inner, dtype=self.kv_type)
            s = cute.make_tensor(pointer, s_layout.outer)
            g = cute.local_tile(m[None, None, share.kv_head, None], (variant.step_keys, HEAD_DIM), (None, 0, None))
            parts.append(cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)))
        (tKsK, tKgK), (tVsV, tVgV) = parts
        stage, phase = Int32(0), Int32(1)
        for step in cutlass.range(share.split, steps, share.splits, unroll=1):
            page, part = union.pages[step // self.block_steps], step % self.block_steps
            # An id that a list repeats leaves an entry without tokens. Nobody would wait for its values before the stage is free again.
            is_read = union.members[step // self.block_steps] != 0
            cute.arch.mbarrier_wait(stages.empty + stage, phase)
            with cute.arch.elect_one():
                for full in (stages.k_full, stages.v_full):
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile_bytes if is_read else 0)
            if is_read:
                cute.copy(tma_k, tKgK[None, part, page], tKsK[None, stage], tma_bar_ptr=stages.k_full + stage)
                cute.copy(tma_v, tVgV[None, part, page], tVsV[None, stage], tma_bar_ptr=stages.v_full + stage)
            stage += 1
            if stage == variant.stages:
                stage, phase = Int32(0), phase ^ 1

    @cute.jit
    def attend(
        self,
        mQ: cute.Tensor,
        rows: RowTile,
        heads: Heads,
        share: Share,
        factor: Float32,
        stages: Stages,
        union: BlockList,
        statistics: Statistics,
        steps: Int32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """A consumer warp: its rows over its keys of every step that one of its tokens picked; leaves outputs, maxima and sums in shared memory."""
        variant = self.variant
        row_warp, key_warp = warp // variant.key_warps, warp % variant.key_warps
        first_row = row_warp * MMA_ROWS
        tokens, first_seeing, last = self.warp_tokens(rows, first_row)
        least_visible = rows.visible(first_seeing)
        rQ, rFactor = self.load_q(mQ, rows, heads, factor, first_row, lane)
        rO = cute.make_rmem_tensor((4, D_TILES), Float32)
        rO.fill(0.0)
        rMax, rSum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        rMax.fill(MINUS_INF)
        rSum.fill(0.0)
        k_address = stages.buffer.toint() + key_warp * self.warp_keys * warp_mma.SWIZZLE_BYTES
        v_address = k_address + variant.stages * self.tile_bytes

        stage, phase = Int32(0), Int32(0)
        for step in cutlass.range(share.split, steps, share.splits, unroll=1):
            members = union.members[step // self.block_steps] & tokens
            first_key = union.blocks[step // self.block_steps] * BLOCK + step % self.block_steps * variant.step_keys + key_warp * self.warp_keys
            # Also by a warp that skips the step, or its arrival below might count for the stage's earlier contents.
            cute.arch.mbarrier_wait(stages.k_full + stage, phase)
            if members != 0:
                for part in cutlass.range(self.warp_keys // self.part_keys, unroll=1):
                    part_key = first_key + part * self.part_keys
                    offset = stage * self.tile_bytes + part * self.part_keys * warp_mma.SWIZZLE_BYTES
                    is_cut = members != tokens or part_key + self.part_keys > least_visible
                    rS = self.multiply_keys(rQ, k_address + offset, lane)
                    for tile in cutlass.range_constexpr(self.key_tiles):
                        for j in cutlass.range_constexpr(4):
                            rS[j, tile] *= rFactor[j // 2]
                    if is_cut:
                        self.mask(rS, rows, members, first_row, part_key, lane)
                    rP = self.softmax(rS, rMax, rSum, rO)
                    cute.arch.mbarrier_wait(stages.v_full + stage, phase)
                    if is_cut:
                        self.multiply_values(rP, rO, v_address + offset, rows.visible(last) - part_key, True, lane)
                    else:
                        self.multiply_values(rP, rO, v_address + offset, Int32(0), False, lane)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(stages.empty + stage)
            stage += 1
            if stage == variant.stages:
                stage, phase = Int32(0), phase ^ 1

        for i in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(rSum[i], threads_in_group=4)
            if lane % 4 == 0:
                statistics.largest[key_warp, first_row + lane // 4 + 8 * i] = rMax[i]
                statistics.total[key_warp, first_row + lane // 4 + 8 * i] = total
        # Outputs take the place of keys and values once no warp reads those any more.
        cute.arch.barrier(barrier_id=READERS, number_of_threads=self.readers * WARP)
        self.store_outputs(rO, self.out_tile(stages.buffer), key_warp, first_row, lane)
        cute.arch.barrier(barrier_id=READERS, number_of_threads=self.readers * WARP)

    @cute.jit
    def warp_tokens(self, rows: RowTile, first_row: Int32) -> tuple[Int32, Int32, Int32]:
        """(bit t: the warp holds token t, which sees keys; the first such token; the last one). Tokens that see nothing come first."""
        first, end = first_row // self.variant.token_rows, (first_row + MMA_ROWS - 1) // self.variant.token_rows + 1
        first = cutlass.max(first, -rows.first_position)
        end = cutlass.min(end, rows.num_tokens)
        tokens = ((Int32(1) << end) - (Int32(1) << first)) if first < end else Int32(0)
        return tokens, first, end - 1

    @cute.jit
    def load_q(self, mQ: cute.Tensor, rows: RowTile, heads: Heads, factor: Float32, first_row: Int32, lane: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """A operands [8, 8 products] of the lane's rows, and each row's factor of its logits.

        Product j of lane 4 g + c sums over dims 64 (j // 4) + 16 c + 4 (j % 4) + (0, 1, 2, 3), or 32 c + 4 j + … with one box: what 16-byte loads
        of K give.
        """
        run = HEAD_DIM // 4 // self.boxes
        rQ = cute.make_rmem_tensor((8, K_STEPS), self.mma_type)
        rFactor = cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range_constexpr(2):
            row = first_row + lane // 4 + 8 * i
            token, head = row // self.variant.token_rows, row % self.variant.token_rows
            rRow = cute.make_rmem_tensor(cute.make_layout((run, self.boxes)), self.q_type)
            rRow.fill(0)
            if token < rows.num_tokens and head < heads.group:
                gRow = mQ[rows.first_row + token, heads.first + head, None]
                for box in cutlass.range_constexpr(self.boxes):
                    cute.autovec_copy(cute.local_tile(gRow, (run,), (box * 4 + lane % 4,)), rRow[None, box])
            rFactor[i] = factor
            if const_expr(self.q_type is Uint8):
                packed, wide = cute.recast_tensor(rRow, Int32), cute.make_rmem_tensor(HEAD_DIM // 8, Int32)
                for j in cutlass.range_constexpr(HEAD_DIM // 8):
                    wide[j] = widen_pair(packed[j // 2], self.variant.q_dtype, bool(j % 2))
                rRow = as_halves(wide)
            if const_expr(self.normalise_q):
                rRow, exponent_factor = self.normalise(rRow)
                rFactor[i] = factor * exponent_factor
            for j in cutlass.range_constexpr(K_STEPS):
                for d in cutlass.range_constexpr(2):
                    rQ[2 * i + d, j] = rRow[4 * j + d]
                    rQ[4 + 2 * i + d, j] = rRow[4 * j + 2 + d]
        return rQ, rFactor

    @cute.jit
    def normalise(self, rRow: cute.Tensor) -> tuple[cute.Tensor, Float32]:
        """A bf16 row as fp16, over the power of two of its largest entry, and that power: exact but for entries below 2^-16 of the largest."""
        wide = rRow.load().to(Float32)
        largest = Float32(0.0)
        for j in cutlass.range_constexpr(HEAD_DIM // 4):
            largest = cute.arch.fmax(largest, cute.arch.fmax(wide[j], -wide[j]))
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
        exponent = cutlass.min(cutlass.max(largest.bitcast(Int32) >> 23, 1), 253)
        rHalf = cute.make_rmem_tensor(HEAD_DIM // 4, Float16)
        rHalf.store((wide * ((254 - exponent) << 23).bitcast(Float32)).to(Float16).reshape(HEAD_DIM // 4))
        return rHalf, (exponent << 23).bitcast(Float32)

    @cute.jit
    def multiply_keys(self, rQ: cute.Tensor, address: Int32, lane: Int32) -> cute.Tensor:
        """Products [4, key tiles] of the warp's rows and keys: 0, 1 are keys 2 c, 2 c + 1 of row g, 2, 3 of row g + 8."""
        atom = mma_atom(self.mma_type)
        rS = cute.make_rmem_tensor((4, self.key_tiles), Float32)
        rS.fill(0.0)
        products = K_STEPS // self.boxes // 2  # that a 16-byte load of a row feeds
        for tile in cutlass.range_constexpr(self.key_tiles):
            for load in cutlass.range_constexpr(2 * self.boxes):
                at = address + load // 2 * self.box_bytes + swizzled(8 * tile + lane // 4, 2 * (lane % 4) + load % 2)
                rK = cute.make_rmem_tensor(4, Int32)
                cute.autovec_copy(shared_tensor(Int32, at, 4), rK)
                if const_expr(self.is_fp8):
                    rWide = cute.make_rmem_tensor(8, Int32)
                    for j in cutlass.range_constexpr(8):
                        rWide[j] = widen_pair(rK[j // 2], self.variant.kv_dtype, bool(j % 2))
                    rK = rWide
                rB = cute.make_tensor(as_halves(rK, self.mma_type).iterator, cute.make_layout((4, products)))
                for j in cutlass.range_constexpr(products):
                    cute.mma_atom_call(atom, rS[None, tile], rQ[None, load * products + j], rB[None, j], rS[None, tile])
        return rS

    @cute.jit
    def mask(self, rS: cute.Tensor, rows: RowTile, members: Int32, first_row: Int32, first_key: Int32, lane: Int32) -> None:
        """-inf where the row's token did not pick the block or does not see the key."""
        for i in cutlass.range_constexpr(2):
            token = (first_row + lane // 4 + 8 * i) // self.variant.token_rows
            end = (rows.visible(token) if (members >> token) & 1 != 0 else Int32(0)) - first_key
            for tile in cutlass.range_constexpr(self.key_tiles):
                for j in cutlass.range_constexpr(2):
                    rS[2 * i + j, tile] = rS[2 * i + j, tile] if 8 * tile + 2 * (lane % 4) + j < end else Float32(MINUS_INF)

    @cute.jit
    def softmax(self, rS: cute.Tensor, rMax: cute.Tensor, rSum: cute.Tensor, rO: cute.Tensor) -> cute.Tensor:
        """Of logits in the log2 domain, the weights as A operands [8, 16-key products]; the running state moves to the new maximum."""
        rScale = cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range_constexpr(2):
            largest = rMax[i]
            for tile in cutlass.range_constexpr(self.key_tiles):
                largest = cute.arch.fmax(largest, cute.arch.fmax(rS[2 * i, tile], rS[2 * i + 1, tile]))
            largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
            # -inf minus -inf would be NaN in a row that has seen no key yet.
            origin = largest if largest > MINUS_INF else Float32(0.0)
            rScale[i] = cute.math.exp2(rMax[i] - origin, fastmath=True)
            rMax[i] = largest
            total = rSum[i] * rScale[i]
            for tile in cutlass.range_constexpr(self.key_tiles):
                for j in cutlass.range_constexpr(2):
                    rS[2 * i + j, tile] = cute.math.exp2(rS[2 * i + j, tile] - origin, fastmath=True)
                    total += rS[2 * i + j, tile]
            rSum[i] = total
        # Maxima seldom move after the first blocks.
        if cute.arch.vote_any_sync(rScale[0] != 1.0 or rScale[1] != 1.0):
            for tile in cutlass.range_constexpr(D_TILES):
                for j in cutlass.range_constexpr(4):
                    rO[j, tile] *= rScale[j // 2]
        rP = cute.make_rmem_tensor((4, self.key_tiles), self.mma_type)
        rP.store(rS.load().to(self.mma_type))
        return cute.make_tensor(rP.iterator, cute.make_layout((8, self.key_tiles // 2)))

    @cute.jit
    def multiply_values(self, rP: cute.Tensor, rO: cute.Tensor, address: Int32, end: Int32, is_cut: cutlass.Constexpr, lane: Int32) -> None:
        """rO += P V. Keys at or behind `end` count as zeros if `is_cut`: their bytes may be NaN.

        A transposed load covers 16 keys by two 16-byte chunks of a row: two tiles of 8 dims in 16 bit; in fp8 four, of even and of odd dims.
        """
        atom = mma_atom(self.mma_type)
        key, chunk = lane % 8 + lane // 8 % 2 * 8, lane // 16
        for product in cutlass.range_constexpr(self.part_keys // MMA_KEYS):
            keep = cute.make_rmem_tensor(2, Int32)
            if const_expr(is_cut):
                for i in cutlass.range_constexpr(2):
                    left = end - (product * MMA_KEYS + 8 * i + 2 * (lane % 4))
                    keep[i] = Int32(-1) if left > 1 else (Int32(0xFFFF) if left == 1 else Int32(0))
            for load in cutlass.range_constexpr(self.boxes * 4):
                at = address + load // 4 * self.box_bytes + swizzled(product * MMA_KEYS + key, load % 4 * 2 + chunk)
                rHalf = cute.make_rmem_tensor(8, self.mma_type)
                load_transposed(self.mma_type, at, rHalf)
                rV = cute.recast_tensor(rHalf, Int32)
                if const_expr(self.is_fp8):
                    rWide = cute.make_rmem_tensor(8, Int32)
                    for j in cutlass.range_constexpr(4):
                        pairs = interleave_rows(rV[j])
                        for odd in cutlass.range_constexpr(2):
                            rWide[j // 2 * 4 + odd * 2 + j % 2] = widen_pair(pairs, self.variant.kv_dtype, bool(odd))
                    rV = rWide
                tiles = cute.size(rV) // 2
                if const_expr(is_cut):
                    for j in cutlass.range_constexpr(2 * tiles):
                        rV[j] &= keep[j % 2]
                rB = cute.make_tensor(as_halves(rV, self.mma_type).iterator, cute.make_layout((4, tiles)))
                for j in cutlass.range_constexpr(tiles):
                    out = rO[None, load * tiles + j]
                    cute.mma_atom_call(atom, out, rP[None, product], rB[None, j], out)

    def out_tile(self, buffer: cute.Pointer) -> cute.Tensor:
        """[D, key warps, rows] fp32 in the place of keys and values."""
        layout = cute.make_layout((HEAD_DIM, self.variant.key_warps, self.rows), stride=(1, self.rows * OUT_PITCH, OUT_PITCH))
        return cute.make_tensor(cute.recast_ptr(buffer, dtype=Float32), layout)

    @cute.jit
    def store_outputs(self, rO: cute.Tensor, sOut: cute.Tensor, key_warp: Int32, first_row: Int32, lane: Int32) -> None:
        """A lane's dims of two tiles of fp8 (even and odd) stand side by side, those of one tile of 16 bit as well."""
        tiles = 2 if self.is_fp8 else 1
        for i in cutlass.range_constexpr(2):
            sRow = sOut[None, key_warp, first_row + lane // 4 + 8 * i]
            for tile in cutlass.range_constexpr(0, D_TILES, tiles):
                run = cute.make_rmem_tensor(2 * tiles, Float32)
                for j in cutlass.range_constexpr(2 * tiles):
                    run[j] = rO[2 * i + j // tiles, tile + j % tiles]
                sRun = cute.local_tile(sRow, (2 * tiles,), (tile // tiles * 4 + lane % 4,))
                cute.autovec_copy(run, sRun)

    @cute.jit
    def join_key_warps(self, sOut: cute.Tensor, statistics: Statistics, row: Int32, lane: Int32) -> tuple[cute.Tensor, Float32, Float32]:
        """(sum of p v, four dims a lane; maximum; sum of p) of a row over the warps that shared its keys."""
        largest = Float32(MINUS_INF)
        for k in cutlass.range_constexpr(self.variant.key_warps):
            largest = cute.arch.fmax(largest, statistics.largest[k, row])
        origin = largest if largest > MINUS_INF else Float32(0.0)
        output, total = cute.make_rmem_tensor(finish_rows.LANE_DIMS, Float32), Float32(0.0)
        output.fill(0.0)
        for k in cutlass.range_constexpr(self.variant.key_warps):
            weight = cute.math.exp2(statistics.largest[k, row] - origin, fastmath=True)
            total += weight * statistics.total[k, row]
            part = cute.make_rmem_tensor(finish_rows.LANE_DIMS, Float32)
            cute.autovec_copy(finish_rows.four(sOut[None, k, row], lane), part)
            for i in cutlass.range_constexpr(finish_rows.LANE_DIMS):
                output[i] += weight * part[i]
        return output, largest, total

    @cute.jit
    def store_partial(
        self,
        output: cute.Tensor,
        largest: Float32,
        total: Float32,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        split: Int32,
        row: Int32,
        head: Int32,
        lane: Int32,
    ) -> None:
        """A split's sum of p v over its sum of p, and its log2-domain LSE; 0 and -inf for a split without keys."""
        for i in cutlass.range_constexpr(finish_rows.LANE_DIMS):
            output[i] = output[i] / total if total > 0.0 else Float32(0.0)
        cute.autovec_copy(output, finish_rows.four(mOut[split, row, head, None], lane))
        if lane == 0:
            mLse[split, row, head] = largest + cute.math.log2(total, fastmath=True) if total > 0.0 else Float32(MINUS_INF)

    @cute.jit
    def clear_padded_rows(
        self,
        mOut: cute.Tensor,
        mLse: Any,
        mCuSeqlens: cute.Tensor,
        num_requests: Int32,
        tile: Int32,
        heads: Heads,
        thread: Int32,
    ) -> None:
        """Rows that no request owns, shared out among the tiles: 0 and -inf."""
        num_rows = mOut.shape[0]
        num_tiles, _, _ = cute.arch.grid_dim()
        owned = cutlass.min(cutlass.max(mCuSeqlens[0], 0), num_rows)
        end = cutlass.max(cutlass.min(mCuSeqlens[num_requests], num_rows), owned)
        for i in cutlass.range(tile, owned + num_rows - end, num_tiles, unroll=1):
            row = i if i < owned else i - owned + end
            for at in cutlass.range(thread, heads.group * HEAD_DIM, self.threads, unroll=1):
                mOut[row, heads.first + at // HEAD_DIM, at % HEAD_DIM] = Float32(0.0).to(mOut.element_type)
            if const_expr(mLse is not None):
                if thread < heads.group:
                    mLse[row, heads.first + thread] = Float32(MINUS_INF)


def build(variant: Variant) -> tuple[SparseDecode, tuple[Any, ...]]:
    """The kernel and its arguments as fake tensors: every length and stride symbolic."""
    kernel = SparseDecode(variant)
    tokens, q_heads, kv_heads, requests, pages = (cute.sym_int() for _ in range(5))
    align = 16 if variant.aligned else None

    def rows(dtype: type[cutlass.Numeric]) -> cute.Tensor:
        strides = [cute.sym_int64(divisibility=8 if variant.aligned else 1) for _ in range(2)]
        return make_fake_tensor(dtype, (tokens, q_heads, HEAD_DIM), (*strides, 1), assumed_align=align)

    def pool() -> cute.Tensor:
        strides = [cute.sym_int64(divisibility=128 // kernel.kv_type.width) for _ in range(3)]
        return make_fake_tensor(kernel.kv_type, (pages, kv_heads, BLOCK, HEAD_DIM), (*strides, 1), assumed_align=16)

    scales = [make_fake_tensor(Float32, (1,), (1,)) if has else None for has in (variant.q_scale, variant.k_scale, variant.v_scale)]
    sink = None
    if variant.sink != "none":
        sink = make_fake_tensor(ELEMENTS[variant.sink], (q_heads, HEAD_DIM), (cute.sym_int64(), cute.sym_int64()))
    return kernel, (
        rows(kernel.q_type),
        pool(),
        pool(),
        make_fake_tensor(Int32, (kv_heads, tokens, cute.sym_int()), tuple(cute.sym_int64() for _ in range(3))),
        make_fake_tensor(Int32, (requests, cute.sym_int()), (cute.sym_int64(), cute.sym_int64())),
        make_fake_tensor(Int32, (requests,), (cute.sym_int64(),)),
        make_fake_tensor(Int32, (cute.sym_int(),), (cute.sym_int64(),)),
        sink,
        rows(BFloat16 if kernel.q_type is Uint8 else kernel.q_type),
        make_fake_tensor(Float32, (tokens, q_heads), (cute.sym_int64(), cute.sym_int64())) if variant.lse else None,
        make_fake_tensor(Uint8, (cute.sym_int64(),), (1,), assumed_align=16) if variant.splits > 1 else None,
        *scales,
        *(Float32(0.0) for _ in range(4)),
        *(Int32(0) for _ in range(3)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


SOURCES = [__file__, decode_schedule.__file__, finish_rows.__file__, merge_splits_sm90.__file__, warp_mma.__file__]
KERNEL: CuteKernel[Variant] = CuteKernel("sparse_decode_sm90", build, sources=SOURCES)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 data as uint8, without a copy."""
    return tensor.view(torch.uint8) if is_fp8(tensor.dtype) else tensor


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the rows of a [T, H, D] tensor start at multiples of 16 bytes."""
    size, (row, head, _) = tensor.element_size(), tensor.stride()
    return (tensor.data_ptr() | row * size | head * size) % 16 == 0


def _check_pool(argument: str, tensor: torch.Tensor) -> None:
    size, (page, head, slot, _) = tensor.element_size(), tensor.stride()
    if (tensor.data_ptr() | page * size | head * size | slot * size) % 16:
        raise UnsupportedProblem(
            f"{argument}: expected an address and strides in multiples of 16 bytes, which TMA needs, got address {tensor.data_ptr():#x} and strides "
            f"{tensor.stride()} of {size} bytes; impl='triton' takes any"
        )


@lru_cache(maxsize=4096)
def _plan(
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    q_shape: tuple[int, ...],
    num_kv_heads: int,
    topk: int,
    num_requests: int,
    max_seqlen_q: int,
    num_blocks: int,
    limit: int,
    lse: bool,
    sink_dtype: torch.dtype | None,
    scale_tensors: tuple[bool, bool, bool],
    aligned: bool,
    override: tuple[tuple[str, int], ...],
) -> tuple[Variant, int]:
    """(variant, splits) of a call, from what the host knows."""
    kv_dtype = dtype_name(k_dtype)
    schedule = schedule_of(max_seqlen_q, num_requests, q_shape[1], num_kv_heads, topk, num_blocks, kv_dtype, q_shape[0], limit, override)
    variant = Variant(
        dtype_name(q_dtype),
        kv_dtype,
        schedule.tokens,
        schedule.token_rows,
        max(16, power_of_2(topk)),
        schedule.key_warps,
        schedule.step_keys,
        schedule.stages,
        power_of_2(schedule.splits),
        lse,
        "none" if sink_dtype is None else dtype_name(sink_dtype),
        *scale_tensors,
        aligned=aligned,
    )
    return variant, schedule.splits


def sparse_decode(call: SparseAttentionCall) -> None:
    """Attention of every query over the visible keys of its selected blocks, at most 16 queries a request; fills call.out and call.lse.

    Raises:
        UnsupportedProblem: a pool whose address or strides are no multiples of 16 bytes.
    """
    q, k, v, batch, sink_key = call.q, call.k, call.v, call.batch, call.sink_key
    if q.shape[0] == 0:
        return
    if batch.num_requests == 0 or batch.max_seqlen_q == 0 or batch.page_table.shape[1] == 0 or k.shape[0] == 0:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(MINUS_INF)
        return
    _check_pool("cache.k", k)
    _check_pool("cache.v", v)
    q_scale, k_scale, v_scale = (None if s.tensor is None else s.tensor.reshape(1) for s in (call.q_scale, call.k_scale, call.v_scale))
    variant, splits = _plan(
        q.dtype,
        k.dtype,
        q.shape,
        k.shape[1],
        call.ids.shape[2],
        batch.num_requests,
        batch.max_seqlen_q,
        batch.num_blocks,
        workspace_limit(),
        call.lse is not None,
        None if sink_key is None else sink_key.dtype,
        (q_scale is not None, k_scale is not None, v_scale is not None),
        _is_aligned(q) and _is_aligned(call.out),
        tuple(settings_override.items()),
    )
    KERNEL.get(variant, q.device)(
        _bytes_of(q),
        _bytes_of(k),
        _bytes_of(v),
        call.ids,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        sink_key,
        call.out,
        call.lse,
        call.workspace if splits > 1 else None,
        q_scale,
        k_scale,
        v_scale,
        call.sm_scale,
        call.q_scale.value,
        call.k_scale.value,
        call.v_scale.value,
        batch.max_seqlen_q,
        batch.max_seqlen_k,
        splits,
    )
