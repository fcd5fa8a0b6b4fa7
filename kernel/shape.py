"""How a launch is cut into programs. Results never depend on it; speed does, and what each backend can do."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..spec import ArgumentError, brief, check_flag

_LARGEST_TILE = 2**20  # elements
_FEW_PAGES = 4  # up to so many, the kernel is unrolled over the pages of a row


@dataclass(frozen=True)
class LaunchShape:
    """Compile-time parameters of the kernel, each a power of two but for `look_back`.

    rows_per_program: rows of a tile, which one program expands and writes.
    count_rows: earlier rows (with look_back: tiles) that a program takes at a time to find its offset into ragged.
    page_chunk: pages of a row counted at a time.
    width_chunk: columns of a row expanded at a time.
    tail_chunk: entries of the tail of lens that one program zeroes.
    num_warps: warps a program, on a GPU.
    look_back: whether programs take the counts of earlier tiles from those tiles' programs, or count for themselves.
    """

    rows_per_program: int = 1
    count_rows: int = 32
    page_chunk: int = 4
    width_chunk: int = 128
    tail_chunk: int = 1024
    num_warps: int = 1
    look_back: bool = False

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "look_back":
                check_flag("shape.look_back", value)
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ArgumentError(f"shape.{name}", "a power of two", brief(value))
            if value > _LARGEST_TILE:
                raise ArgumentError(f"shape.{name}", f"at most {_LARGEST_TILE}", brief(value))
        for name, other in (("rows_per_program", "width_chunk"), ("count_rows", "page_chunk")):
            size = getattr(self, name) * getattr(self, other)
            if size > _LARGEST_TILE:
                expected = f"{name} * {other} of at most {_LARGEST_TILE}, Triton's largest tile"
                raise ArgumentError(f"shape.{name}", expected, brief(size))

    def tiles(self, num_tokens: int) -> int:
        """Programs that write rows: one even when there are none, for indptr[0]."""
        return max(1, -(-num_tokens // self.rows_per_program))

    def state_size(self, num_tokens: int) -> int:
        """Words of the look-back state for so many rows."""
        tiles = self.tiles(num_tokens)
        return 1 + tiles + -(-tiles // self.count_rows)

    def programs(self, num_tokens: int, lens_size: int) -> int:
        """Programs of one group: those that write rows, and those that zero the tail of lens."""
        return self.tiles(num_tokens) + -(-(lens_size - num_tokens) // self.tail_chunk)

    def constants(
        self,
        num_tokens: int,
        width: int,
        max_pages: int,
        block_size: int,
        noncausal: bool,
        pow2: bool,
        step: bool,
        amd: bool,
    ) -> dict[str, int | bool]:
        """The kernel's compile-time parameters, in its order, for groups of up to such sizes."""
        # Nothing within a row, rounded up to whole chunks, lies further from the start of its first page.
        far = width + self.width_chunk + block_size * (max_pages + self.page_chunk)
        return {
            "NONCAUSAL": noncausal,
            "POW2": pow2,
            "NARROW": far < 2**31,
            "ROWS": self.rows_per_program,
            "COUNT_ROWS": self.count_rows,
            "PAGE_CHUNK": self.page_chunk,
            "WIDTH_CHUNK": self.width_chunk,
            "TAIL_CHUNK": self.tail_chunk,
            "ONE_COUNT": not self.look_back and num_tokens <= self.count_rows,
            "FEW_PAGES": max_pages <= self.page_chunk <= _FEW_PAGES,
            "LOOK_BACK": self.look_back,
            "STEP": step,
            "AMD": amd,
        }


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def gpu_shapes(width: int, max_pages: int, groups: int = 1, wave: int = 32) -> list[tuple[int, LaunchShape]]:
    """The shapes for a GPU, each after the most rows that it is for: the one place that decides by size.

    groups: cache groups of the launch. wave: lanes that run as one, 64 on gfx942. Few shapes on purpose: each is a
    compiled kernel that a server must have ready. The bounds were measured on an H200, whose waves have 32. With 64,
    each lane's predicate takes a bit of the scalar registers, and look-back has to do with fewer rows a program.
    """
    pages, count = (4, 512) if max_pages <= 4 else (16, 128)  # many rows by many pages at a time spill registers
    whole = 128 if width <= 128 else 256
    # One group leaves most of the GPU idle, so its programs may have many warps; several groups share it.
    warps, tail = (4, 1024) if groups == 1 else (1, 4096)
    shapes = [
        (32, LaunchShape(1, 32, pages, whole, tail, warps)),
        (64, LaunchShape(1, 64, pages, whole, tail, warps)),
    ]
    if groups == 1:
        shapes.append((512, LaunchShape(4, count, pages, whole, tail, 8)))
    if wave == 64:
        return [*shapes, (2**31, LaunchShape(4, 32, 4, 64, 1024, 4, look_back=True))]
    return [
        *shapes,
        (8192, LaunchShape(8, 64, pages, 64, 1024, 2, look_back=True)),
        (2**31, LaunchShape(16, 64, pages, 64, 1024, 2, look_back=True)),
    ]


def gpu_shape(num_tokens: int, width: int, max_pages: int, groups: int = 1, wave: int = 32) -> LaunchShape:
    """The shape for a launch of so many rows."""
    shapes = gpu_shapes(width, max_pages, groups, wave)
    return next(shape for most, shape in shapes if num_tokens <= most)


def counting_shape(width: int, max_pages: int, wave: int = 32) -> LaunchShape:
    """The shape for a launch of any number of rows that has no state for look-back."""
    return gpu_shape(512, width, max_pages, wave=wave)


def interpreter_shape(num_tokens: int, width: int, max_pages: int, lens_tail: int) -> LaunchShape:
    """The shape for Triton's interpreter, which pays for each program and each operation, hardly for the elements."""
    return LaunchShape(
        rows_per_program=min(512, _power_of_two(num_tokens)),
        count_rows=min(512, _power_of_two(num_tokens)),
        page_chunk=min(256, _power_of_two(max_pages)),
        width_chunk=min(1024, _power_of_two(width)),
        tail_chunk=min(16384, _power_of_two(lens_tail)),
    )
