"""The Triton kernel: the sliding-window metadata of one cache group in one launch. SPEC.md numbers the clauses.

Each program writes a tile of `ROWS` rows; further programs zero the tail of lens. A tile's offset into ragged is the
number of entries that all earlier rows keep, found in one of two ways, in neither of which a program must wait for
another:

- Counting, for few rows: each program counts all earlier rows itself. It counts by page and not by entry, since the
  kept entries of a row on one page are one stretch: from the later of page start and row start to the earliest of
  page end, row end and the last slot that fits int32.
- Look-back, for many: each program publishes the count of its own tile in `state`, adds it to the sum of its bunch of
  tiles, and then adds up what the earlier bunches and tiles have published. It looks a few times for what is missing,
  and counts the rest itself, so that the launch ends in whatever order programs run, one at a time too. The last
  program to have its offset clears `state` for the next launch.

Positions are sums of a few int32 inputs, below 2**34 in magnitude, and are held in int64. The launcher hands over
window and block size cut to 2**34, which changes nothing: no position lies beyond. Within a row everything is relative
to the start of its first page, and int32 where the launcher knows that it fits (NARROW). A page number times
min(block_size, 2**31) stays below 2**62, and from page 1 on a larger block size has no slot that fits int32 either.

All loads that a count needs come before the first store: a load cannot be moved ahead of a store to memory that may be
the same, and the chain from token to request to page is what a launch of few rows spends its time on.

Every argument is unspecialised: one compiled kernel serves any number of rows, stride and alignment. Loops are
`while` loops, since the interpreter of Triton up to 3.6 has no `range` over run-time bounds under NumPy 2.4.
"""

import triton
import triton.language as tl

# How often a program looks for what earlier tiles have not yet published before it counts that itself.
LOOKS = tl.constexpr(256)
# int64 words that describe one group of a step: see `Binding.words`.
GROUP_WORDS = tl.constexpr(16)


@triton.jit
def _rows(
    t,
    inside,
    slot_mapping,
    query_start_loc,
    seq_lens,
    token_to_req,
    block_table,
    replay_start,
    num_reqs,
    window_size,
    columns,
    block_size,
    block_shift,
    width,
    block_table_stride,
    NONCAUSAL: tl.constexpr,
    POW2: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Clauses 1 to 8 for tokens t [N]: whether each is valid, and its row.

    A row is where its pages begin in the table, where in the first of them it starts, its length, and how many pages
    the table has from there on.
    """
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
    k = _block_of(first, block_size, block_shift, POW2)
    pages = block_table + req * block_table_stride + k
    left = tl.minimum(tl.maximum(columns - k, 0), 2147483647)
    start = first - k * block_size
    if NARROW:
        return valid, pages, start.to(tl.int32), length.to(tl.int32), left.to(tl.int32)
    else:
        return valid, pages, start, length, left


@triton.jit
def _block_of(position, block_size, block_shift, POW2: tl.constexpr):
    """position // block_size for positions of at least 0."""
    if POW2:
        return position >> block_shift.to(position.dtype)
    else:
        return position // block_size


@triton.jit
def _first_slot(page, block_size):
    """Clause 8, as int64: the slot of a page's first position, or one past int32 where no slot of the page fits it."""
    if block_size.dtype == tl.int32:
        return page.to(tl.int64) * block_size.to(tl.int64)
    else:
        return page.to(tl.int64) * tl.minimum(block_size, 2147483648)


@triton.jit
def _kept_on(j, pages, start, end, left, block_size):
    """How many positions of rows start .. end-1 have a slot on their pages j. Those of one page are one stretch."""
    page_start = j * block_size
    page = tl.load(pages + j, mask=(page_start < end) & (j < left), other=-1)
    slots = tl.maximum(tl.minimum(2147483648 - _first_slot(page, block_size), block_size), 0)
    count = tl.minimum(page_start + slots.to(start.dtype), end) - tl.maximum(page_start, start)
    return tl.where((page >= 0) & (count > 0), count, 0)


@triton.jit
def _kept(pages, start, length, left, block_size, max_pages, PAGE_CHUNK: tl.constexpr, FEW_PAGES: tl.constexpr):
    """Clauses 8, 9 and 11: how many entries each row [N] keeps, as int32."""
    # No page ends before 0: a row that sees nothing reads nothing, since even its request may have no table row.
    end = tl.where(length > 0, start + length, 0)
    total = tl.zeros_like(start)
    if FEW_PAGES:
        for page in tl.static_range(PAGE_CHUNK):
            total += _kept_on(page, pages, start, end, left, block_size)
    else:
        done = block_size * 0
        while done < max_pages:
            j = done + tl.arange(0, PAGE_CHUNK)[None, :].to(block_size.dtype)
            kept = _kept_on(j, pages[:, None], start[:, None], end[:, None], left[:, None], block_size)
            total += tl.sum(kept, axis=1)
            done += PAGE_CHUNK
    return total.to(tl.int32)


@triton.jit
def _entries(i, pages, start, length, left, block_size, block_shift, POW2: tl.constexpr):
    """Clauses 8 to 10: columns i [1, M] of the dense rows [N], as int32 [N, M]; -1 where there is no slot."""
    position = start[:, None] + i
    j = _block_of(position, block_size, block_shift, POW2)
    page = tl.load(pages[:, None] + j, mask=(i < length[:, None]) & (j < left[:, None]), other=-1)
    slot = _first_slot(page, block_size) + (position - j * block_size)
    return tl.where((page >= 0) & (slot < 2147483648), slot, -1).to(tl.int32)


@triton.jit
def _kept_before(
    end,
    t,
    slot_mapping,
    query_start_loc,
    seq_lens,
    token_to_req,
    block_table,
    replay_start,
    num_reqs,
    window_size,
    columns,
    block_size,
    block_shift,
    width,
    max_pages,
    block_table_stride,
    NONCAUSAL: tl.constexpr,
    POW2: tl.constexpr,
    NARROW: tl.constexpr,
    PAGE_CHUNK: tl.constexpr,
    FEW_PAGES: tl.constexpr,
):
    """Clause 11: how many entries those of the rows t [N] keep that lie before row `end`."""
    _, pages, start, length, left = _rows(
        t,
        t < end,
        slot_mapping,
        query_start_loc,
        seq_lens,
        token_to_req,
        block_table,
        replay_start,
        num_reqs,
        window_size,
        columns,
        block_size,
        block_shift,
        width,
        block_table_stride,
        NONCAUSAL,
        POW2,
        NARROW,
    )
    kept = _kept(pages, start, length, left, block_size.to(start.dtype), max_pages, PAGE_CHUNK, FEW_PAGES)
    return tl.sum(kept, axis=0)


@triton.jit
def _kept_between(
    begin,
    end,
    slot_mapping,
    query_start_loc,
    seq_lens,
    token_to_req,
    block_table,
    replay_start,
    num_reqs,
    window_size,
    columns,
    block_size,
    block_shift,
    width,
    max_pages,
    block_table_stride,
    NONCAUSAL: tl.constexpr,
    POW2: tl.constexpr,
    NARROW: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    PAGE_CHUNK: tl.constexpr,
    FEW_PAGES: tl.constexpr,
):
    """Clause 11: how many entries rows begin .. end-1 keep."""
    total = tl.zeros([], tl.int32)
    while begin < end:
        total += _kept_before(
            end,
            begin + tl.arange(0, COUNT_ROWS),
            slot_mapping,
            query_start_loc,
            seq_lens,
            token_to_req,
            block_table,
            replay_start,
            num_reqs,
            window_size,
            columns,
            block_size,
            block_shift,
            width,
            max_pages,
            block_table_stride,
            NONCAUSAL,
            POW2,
            NARROW,
            PAGE_CHUNK,
            FEW_PAGES,
        )
        begin += COUNT_ROWS
    return total


@triton.jit
def _fresh(word_at, there, AMD: tl.constexpr):
    """Words that other programs write meanwhile; 0 where not `there`."""
    if AMD:
        # Triton's AMD backend drops `volatile` in some versions and forms; NVIDIA's takes no modifier beside it.
        word = tl.load(word_at, mask=there, other=0, volatile=True, cache_modifier=".cv")
    else:
        word = tl.load(word_at, mask=there, other=0, volatile=True)
    return word


@triton.jit
def _published_before(
    tile,
    tiles,
    state,
    slot_mapping,
    query_start_loc,
    seq_lens,
    token_to_req,
    block_table,
    replay_start,
    num_reqs,
    window_size,
    columns,
    block_size,
    block_shift,
    width,
    max_pages,
    block_table_stride,
    NONCAUSAL: tl.constexpr,
    POW2: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    PAGE_CHUNK: tl.constexpr,
    FEW_PAGES: tl.constexpr,
    AMD: tl.constexpr,
):
    """Clause 11: how many entries the tiles before `tile` keep: what `state` says, and where it does not, by counting.

    Of all bunches of COUNT_ROWS tiles but the last, the sums are read, and of that one the tiles.
    """
    lane = tl.arange(0, 2 * COUNT_ROWS)
    of_bunch = lane >= COUNT_ROWS  # the others are of single tiles
    full = tl.where(of_bunch, COUNT_ROWS, 1).to(tl.int64) << 40
    rows = tl.where(of_bunch, COUNT_ROWS * ROWS, ROWS)
    bunch = tile // COUNT_ROWS
    total = tl.zeros([], tl.int32)
    done = tile * 0
    while done <= bunch:
        item = tl.where(of_bunch, done + lane - COUNT_ROWS, bunch * COUNT_ROWS + lane)
        there = tl.where(of_bunch, item < bunch, (item < tile) & (done == 0)) != 0
        word_at = state + 1 + tl.where(of_bunch, tiles, 0) + item
        word = _fresh(word_at, there, AMD)
        missing = tl.sum((there & (word < full)).to(tl.int32), axis=0)
        looks = missing * 0
        while (missing > 0) & (looks < LOOKS):
            word = _fresh(word_at, there, AMD)
            missing = tl.sum((there & (word < full)).to(tl.int32), axis=0)
            looks += 1
        while missing > 0:
            late = tl.min(tl.where(there & (word < full), lane, 2 * COUNT_ROWS), axis=0)
            begin = tl.sum(tl.where(lane == late, item * rows, 0), axis=0)
            end = begin + tl.sum(tl.where(lane == late, rows, 0), axis=0)
            kept = _kept_between(
                begin,
                end,
                slot_mapping,
                query_start_loc,
                seq_lens,
                token_to_req,
                block_table,
                replay_start,
                num_reqs,
                window_size,
                columns,
                block_size,
                block_shift,
                width,
                max_pages,
                block_table_stride,
                NONCAUSAL,
                POW2,
                NARROW,
                COUNT_ROWS,
                PAGE_CHUNK,
                FEW_PAGES,
            )
            word = tl.where(lane == late, full + kept, word)
            missing -= 1
        total += tl.sum(tl.where(there, word - full, 0), axis=0).to(tl.int32)
        done += COUNT_ROWS
    return total


@triton.jit
def _publish(tile, tiles, state, kept, COUNT_ROWS: tl.constexpr):
    """Add a tile's count to `state`; what it gives back is 0 and comes after that."""
    word = (tl.full([], 1, tl.int64) << 40) + kept
    own = tl.atomic_xchg(state + 1 + tile, word, sem="relaxed")
    bunch = tl.atomic_add(state + 1 + tiles + tile // COUNT_ROWS, word, sem="relaxed")
    return tl.minimum(tl.minimum(own, bunch), 0)


@triton.jit
def _arrive(tiles, state, after, CHUNK: tl.constexpr):
    """Say that a tile has its offset; the last of all clears the state, for nobody reads it any more.

    `after` is 0 or more, which the compiler cannot know: so the addition comes after the reads and exchanges that
    `after` was made from.
    """
    arrived = tl.atomic_add(state, 1 + tl.minimum(after, 0).to(tl.int64), sem="relaxed")
    if arrived == tiles - 1:
        words = 1 + tiles + (tiles + CHUNK - 1) // CHUNK
        done = tiles * 0
        while done < words:
            i = done + tl.arange(0, CHUNK)
            tl.store(state + i, tl.zeros([CHUNK], tl.int64), mask=i < words)
            done += CHUNK


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
        "state",
        "groups",
        "num_tokens",
        "num_reqs",
        "window_size",
        "columns",
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
    state,
    groups,
    num_tokens: tl.int64,
    num_reqs: tl.int64,
    window_size: tl.int64,
    columns: tl.int64,
    block_size: tl.int64,
    block_shift: tl.int32,
    width: tl.int64,
    max_pages: tl.int64,
    lens_size: tl.int64,
    indices_stride: tl.int64,
    block_table_stride: tl.int64,
    NONCAUSAL: tl.constexpr,
    POW2: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    PAGE_CHUNK: tl.constexpr,
    WIDTH_CHUNK: tl.constexpr,
    TAIL_CHUNK: tl.constexpr,
    ONE_COUNT: tl.constexpr,
    FEW_PAGES: tl.constexpr,
    LOOK_BACK: tl.constexpr,
    STEP: tl.constexpr,
    AMD: tl.constexpr,
):
    """One group, or with STEP those of a step: axis 1 of the grid goes over the rows of `groups` [n, GROUP_WORDS].

    state, for LOOK_BACK: int64 [1 + tiles + bunches], zero before the launch and after it. How many tiles have their
    offset; for each tile 2**40 + its count, once that is known; for each bunch of COUNT_ROWS tiles the sum of those.
    """
    if STEP:
        group = groups + tl.program_id(1).to(tl.int64) * GROUP_WORDS
        slot_mapping = tl.load(group).to(tl.pointer_type(tl.int64))
        is_valid = tl.load(group + 1).to(tl.pointer_type(tl.int1))
        indices = tl.load(group + 2).to(tl.pointer_type(tl.int32))
        lens = tl.load(group + 3).to(tl.pointer_type(tl.int32))
        ragged = tl.load(group + 4).to(tl.pointer_type(tl.int32))
        indptr = tl.load(group + 5).to(tl.pointer_type(tl.int32))
        block_table = tl.load(group + 6).to(tl.pointer_type(tl.int32))
        state = tl.load(group + 7).to(tl.pointer_type(tl.int64))
        columns = tl.load(group + 8)
        block_size = tl.load(group + 9)
        block_shift = tl.load(group + 10).to(tl.int32)
        width = tl.load(group + 11)
        max_pages = tl.load(group + 12)
        lens_size = tl.load(group + 13)
        indices_stride = tl.load(group + 14)
        block_table_stride = tl.load(group + 15)
    # The interpreter gives a scalar the narrowest type that holds it; a compiled kernel has them wide already.
    num_tokens = num_tokens.to(tl.int64)
    window_size = window_size.to(tl.int64)
    block_size = block_size.to(tl.int64)
    width = width.to(tl.int64)
    # Without rows, no time for wide ones.
    width = tl.where(num_tokens > 0, width, 1)
    max_pages = tl.where(num_tokens > 0, max_pages, 1).to(tl.int64)
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
    valid, pages, start, length, left = _rows(
        t,
        inside,
        slot_mapping,
        query_start_loc,
        seq_lens,
        token_to_req,
        block_table,
        replay_start,
        num_reqs,
        window_size,
        columns,
        block_size,
        block_shift,
        width,
        block_table_stride,
        NONCAUSAL,
        POW2,
        NARROW,
    )
    page_size = block_size.to(start.dtype)
    kept = _kept(pages, start, length, left, page_size, max_pages, PAGE_CHUNK, FEW_PAGES)
    if LOOK_BACK:
        published = _publish(program, row_programs, state, tl.sum(kept, axis=0), COUNT_ROWS)
        offset = _published_before(
            program,
            row_programs,
            state,
            slot_mapping,
            query_start_loc,
            seq_lens,
            token_to_req,
            block_table,
            replay_start,
            num_reqs,
            window_size,
            columns,
            block_size,
            block_shift,
            width,
            max_pages,
            block_table_stride,
            NONCAUSAL,
            POW2,
            NARROW,
            ROWS,
            COUNT_ROWS,
            PAGE_CHUNK,
            FEW_PAGES,
            AMD,
        )
        _arrive(row_programs, state, offset + published, COUNT_ROWS)
    elif ONE_COUNT:
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
            window_size,
            columns,
            block_size,
            block_shift,
            width,
            max_pages,
            block_table_stride,
            NONCAUSAL,
            POW2,
            NARROW,
            PAGE_CHUNK,
            FEW_PAGES,
        )
    else:
        offset = _kept_between(
            row0 * 0,
            row0,
            slot_mapping,
            query_start_loc,
            seq_lens,
            token_to_req,
            block_table,
            replay_start,
            num_reqs,
            window_size,
            columns,
            block_size,
            block_shift,
            width,
            max_pages,
            block_table_stride,
            NONCAUSAL,
            POW2,
            NARROW,
            COUNT_ROWS,
            PAGE_CHUNK,
            FEW_PAGES,
        )

    ends = offset + tl.cumsum(kept, axis=0)
    tl.store(is_valid + t, valid, mask=inside)
    tl.store(lens + t, length.to(tl.int32), mask=inside)
    tl.store(indptr + 1 + t, ends, mask=inside)
    if program == 0:
        tl.store(indptr, 0)

    begins = (ends - kept)[:, None]
    holes = tl.max((kept != length).to(tl.int32), axis=0)
    chunk = width * 0
    while chunk < width:
        i = chunk.to(start.dtype) + tl.arange(0, WIDTH_CHUNK)[None, :]
        entry = _entries(i, pages, start, length, left, page_size, block_shift, POW2)
        tl.store(indices + t[:, None] * indices_stride + i, entry, mask=inside[:, None] & (i < width))
        if holes > 0:
            keep = (entry >= 0).to(tl.int32)
            tl.store(ragged + begins + tl.cumsum(keep, axis=1) - 1, entry, mask=entry >= 0)
            begins += tl.sum(keep, axis=1)[:, None]
        else:
            tl.store(ragged + begins + i, entry, mask=entry >= 0)
        chunk += WIDTH_CHUNK
