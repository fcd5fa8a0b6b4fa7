"""The Triton kernel: the sliding-window metadata of one cache group in one launch. SPEC.md numbers the clauses.

Each program writes `ROWS` rows; further programs zero the tail of lens. No program waits for another: each finds its
offset into ragged by counting the entries that all earlier rows keep. It counts by page and not by entry, since the
kept entries of a row on one page are one stretch: from the later of page start and row start to the earliest of page
end, row end and the last slot that fits int32.

Positions are sums of a few int32 inputs, below 2**34 in magnitude, and are held in int64. The launcher hands over
window and block size cut to 2**34, which changes nothing: no position lies beyond. A page number times
min(block_size, 2**31) stays below 2**62, and from page 1 on a larger block size has no slot that fits int32 either.

Every argument is unspecialised: one compiled kernel serves any number of rows, stride and alignment. Loops are
`while` loops, since the interpreter of Triton up to 3.6 has no `range` over run-time bounds under NumPy 2.4.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(
    t,
    inside,
    slot_mapping,
    query_start_loc,
    seq_lens,
    token_to_req,
    replay_start,
    num_reqs,
    window_size,
    width,
    NONCAUSAL: tl.constexpr,
):
    """Clauses 1 to 7 for tokens t [N]: valid, request (0 where there is none), first position, length."""
    valid = tl.load(slot_mapping + t, mask=inside, other=-1) >= 0
    named = tl.load(token_to_req + t, mask=inside, other=-1)
    live = valid & (named >= 0) & (named < num_reqs)
    req = tl.where(live, named, 0).to(tl.int64)
    q0 = tl.load(query_start_loc + req, mask=live, other=0).to(tl.int64)
    q1 = tl.load(query_start_loc + req + 1, mask=live, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens + req, mask=live, other=0).to(tl.int64)
    prefix = seq_len - (q1 - q0)
    if NONCAUSAL:
        end = seq_len
        first = tl.maximum(prefix - window_size, 0)
    else:
        end = prefix + t - q0 + 1
        replay = tl.load(replay_start + req, mask=live, other=0).to(tl.int64)
        first = tl.maximum(tl.maximum(end - window_size, 0), replay)
    length = tl.where(live, tl.minimum(tl.maximum(end - first, 0), width), 0)
    return valid, req, first, length


@triton.jit
def _block_of(position, block_size, block_shift, POW2: tl.constexpr):
    """position // block_size for positions of at least 0."""
    if POW2:
        return position >> block_shift
    else:
        return position // block_size


@triton.jit
def _kept(
    req,
    first,
    length,
    block_table,
    block_table_stride,
    columns,
    block_size,
    block_shift,
    max_pages,
    PAGE_CHUNK: tl.constexpr,
    ONE_PAGE_CHUNK: tl.constexpr,
    POW2: tl.constexpr,
):
    """Clauses 8, 9 and 11: how many entries each row [N] keeps."""
    start = first[:, None]
    # No page ends before 0: a row that sees nothing reads nothing, since even its request may have no table row.
    end = tl.where(length > 0, first + length, 0)[:, None]
    row = (block_table + req * block_table_stride)[:, None]
    k = _block_of(first, block_size, block_shift, POW2)[:, None] + tl.arange(0, PAGE_CHUNK)[None, :]
    if ONE_PAGE_CHUNK:
        return _kept_on_pages(k, start, end, row, columns, block_size)
    else:
        total = tl.zeros_like(length).to(tl.int32)
        pages = max_pages * 0
        while pages < max_pages:
            total += _kept_on_pages(k + pages, start, end, row, columns, block_size)
            pages += PAGE_CHUNK
        return total


@triton.jit
def _kept_on_pages(k, start, end, row, columns, block_size):
    """How many entries of rows start .. end-1 [N, 1] are kept in blocks k [N, P], as int32 [N]."""
    page_start = k * block_size
    page = tl.load(row + k, mask=(page_start < end) & (k < columns), other=-1).to(tl.int64)
    page_end = page_start + tl.minimum(block_size, 2147483648 - page * tl.minimum(block_size, 2147483648))
    count = tl.minimum(page_end, end) - tl.maximum(page_start, start)
    return tl.sum(tl.where((page >= 0) & (count > 0), count, 0).to(tl.int32), axis=1)


@triton.jit
def _entries(
    i, req, first, length, block_table, block_table_stride, columns, block_size, block_shift, POW2: tl.constexpr
):
    """Clauses 8 to 10: columns i [1, M] of the dense rows [N], as int32 [N, M]; -1 where there is no slot."""
    position = first[:, None] + i
    k = _block_of(position, block_size, block_shift, POW2)
    row = (block_table + req * block_table_stride)[:, None]
    page = tl.load(row + k, mask=(i < length[:, None]) & (k < columns), other=-1).to(tl.int64)
    slot = page * tl.minimum(block_size, 2147483648) + (position - k * block_size)
    return tl.where((page >= 0) & (slot < 2147483648), slot, -1).to(tl.int32)


@triton.jit
def _kept_before(
    row0,
    t,
    slot_mapping,
    query_start_loc,
    seq_lens,
    token_to_req,
    block_table,
    replay_start,
    num_reqs,
    columns,
    window_size,
    block_size,
    block_shift,
    width,
    max_pages,
    block_table_stride,
    NONCAUSAL: tl.constexpr,
    POW2: tl.constexpr,
    PAGE_CHUNK: tl.constexpr,
    ONE_PAGE_CHUNK: tl.constexpr,
):
    """Clause 11: how many entries those of the rows t [N] keep that lie before row0."""
    _, req, first, length = _rows(
        t,
        t < row0,
        slot_mapping,
        query_start_loc,
        seq_lens,
        token_to_req,
        replay_start,
        num_reqs,
        window_size,
        width,
        NONCAUSAL,
    )
    kept = _kept(
        req,
        first,
        length,
        block_table,
        block_table_stride,
        columns,
        block_size,
        block_shift,
        max_pages,
        PAGE_CHUNK,
        ONE_PAGE_CHUNK,
        POW2,
    )
    return tl.sum(kept, axis=0)


@triton.jit(
    do_not_specialize=[
        "slot_mapping",
        "is_valid",
        "indices",
        "lens",
        "ragged",
        "indptr",
        "query_start_loc",
        "seq_lens",
        "token_to_req",
        "block_table",
        "replay_start",
        "num_tokens",
        "num_reqs",
        "columns",
        "window_size",
        "block_size",
        "block_shift",
        "width",
        "max_pages",
        "lens_size",
        "indices_stride",
        "block_table_stride",
    ]
)
def decode_meta_kernel(
    slot_mapping,
    is_valid,
    indices,
    lens,
    ragged,
    indptr,
    query_start_loc,
    seq_lens,
    token_to_req,
    block_table,
    replay_start,
    num_tokens: tl.int64,
    num_reqs: tl.int64,
    columns: tl.int64,
    window_size: tl.int64,
    block_size: tl.int64,
    block_shift: tl.int64,
    width: tl.int64,
    max_pages: tl.int64,
    lens_size: tl.int64,
    indices_stride: tl.int64,
    block_table_stride: tl.int64,
    NONCAUSAL: tl.constexpr,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    PAGE_CHUNK: tl.constexpr,
    WIDTH_CHUNK: tl.constexpr,
    TAIL_CHUNK: tl.constexpr,
    ONE_COUNT: tl.constexpr,
    ONE_PAGE_CHUNK: tl.constexpr,
    ONE_WIDTH_CHUNK: tl.constexpr,
):
    # The interpreter gives a scalar the narrowest type that holds it; a compiled kernel has them wide already.
    num_tokens = num_tokens.to(tl.int64)
    window_size = window_size.to(tl.int64)
    block_size = block_size.to(tl.int64)
    width = width.to(tl.int64)
    max_pages = max_pages.to(tl.int64)
    indices_stride = indices_stride.to(tl.int64)
    block_table_stride = block_table_stride.to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    row_programs = tl.maximum((num_tokens + ROWS - 1) // ROWS, 1)
    if program >= row_programs:
        tail = num_tokens + (program - row_programs) * TAIL_CHUNK + tl.arange(0, TAIL_CHUNK)
        tl.store(lens + tail, tl.zeros([TAIL_CHUNK], tl.int32), mask=tail < lens_size)
        return

    row0 = program * ROWS
    t = row0 + tl.arange(0, ROWS)
    inside = t < num_tokens
    valid, req, first, length = _rows(
        t,
        inside,
        slot_mapping,
        query_start_loc,
        seq_lens,
        token_to_req,
        replay_start,
        num_reqs,
        window_size,
        width,
        NONCAUSAL,
    )
    tl.store(is_valid + t, valid, mask=inside)
    tl.store(lens + t, length.to(tl.int32), mask=inside)

    if ONE_COUNT:
        offset = _kept_before(
            row0,
            tl.arange(0, COUNT_ROWS),
            slot_mapping,
            query_start_loc,
            seq_lens,
            token_to_req,
            block_table,
            replay_start,
            num_reqs,
            columns,
            window_size,
            block_size,
            block_shift,
            width,
            max_pages,
            block_table_stride,
            NONCAUSAL,
            POW2,
            PAGE_CHUNK,
            ONE_PAGE_CHUNK,
        )
    else:
        offset = tl.zeros([], tl.int32)
        earlier = program * 0
        while earlier < row0:
            offset += _kept_before(
                row0,
                earlier + tl.arange(0, COUNT_ROWS),
                slot_mapping,
                query_start_loc,
                seq_lens,
                token_to_req,
                block_table,
                replay_start,
                num_reqs,
                columns,
                window_size,
                block_size,
                block_shift,
                width,
                max_pages,
                block_table_stride,
                NONCAUSAL,
                POW2,
                PAGE_CHUNK,
                ONE_PAGE_CHUNK,
            )
            earlier += COUNT_ROWS

    i = tl.arange(0, WIDTH_CHUNK)[None, :]
    if ONE_WIDTH_CHUNK:
        entry = _entries(i, req, first, length, block_table, block_table_stride, columns, block_size, block_shift, POW2)
        tl.store(indices + t[:, None] * indices_stride + i, entry, mask=inside[:, None] & (i < width))
        keep = (entry >= 0).to(tl.int32)
        kept = tl.sum(keep, axis=1)
        ends = offset + tl.cumsum(kept, axis=0)
        place = (ends - kept - 1)[:, None] + tl.cumsum(keep, axis=1)
        tl.store(ragged + place, entry, mask=entry >= 0)
    else:
        kept = _kept(
            req,
            first,
            length,
            block_table,
            block_table_stride,
            columns,
            block_size,
            block_shift,
            max_pages,
            PAGE_CHUNK,
            ONE_PAGE_CHUNK,
            POW2,
        )
        ends = offset + tl.cumsum(kept, axis=0)
        last = (ends - kept - 1)[:, None]
        chunk = width * 0
        while chunk < width:
            entry = _entries(
                chunk + i, req, first, length, block_table, block_table_stride, columns, block_size, block_shift, POW2
            )
            inside_row = inside[:, None] & (chunk + i < width)
            tl.store(indices + t[:, None] * indices_stride + chunk + i, entry, mask=inside_row)
            keep = (entry >= 0).to(tl.int32)
            tl.store(ragged + last + tl.cumsum(keep, axis=1), entry, mask=entry >= 0)
            last += tl.sum(keep, axis=1)[:, None]
            chunk += WIDTH_CHUNK
    tl.store(indptr + 1 + t, ends, mask=inside)
    if program == 0:
        tl.store(indptr, 0)
