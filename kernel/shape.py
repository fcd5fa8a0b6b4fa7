"""How a launch is cut into programs. Results never depend on it; speed does, and what each backend can do."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..spec import ArgumentError, brief

_LARGEST_TILE = 2**20  # elements


@dataclass(frozen=True)
class LaunchShape:
    """Compile-time parameters of the kernel, each a power of two.

    rows_per_program: rows that one program expands and writes.
    count_rows: earlier rows that a program counts at a time, to find its offset into ragged.
    page_chunk: pages of a row counted at a time.
    width_chunk: columns of a row expanded at a time.
    tail_chunk: entries of the tail of lens that one program zeroes.
    num_warps: warps a program, on a GPU.
    """

    rows_per_program: int = 1
    count_rows: int = 32
    page_chunk: int = 4
    width_chunk: int = 128
    tail_chunk: int = 1024
    num_warps: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ArgumentError(f"shape.{name}", "a power of two", brief(value))
            if value > _LARGEST_TILE:
                raise ArgumentError(f"shape.{name}", f"at most {_LARGEST_TILE}", brief(value))
        for name, other in (("rows_per_program", "width_chunk"), ("count_rows", "page_chunk")):
            size = getattr(self, name) * getattr(self, other)
            if size > _LARGEST_TILE:
                expected = f"{name} * {other} of at most {_LARGEST_TILE}, Triton's largest tile"
                raise ArgumentError(f"shape.{name}", expected, brief(size))


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def gpu_shape(num_tokens: int, width: int, max_pages: int) -> LaunchShape:
    """The shape for a GPU: the fewer rows, the fewer a program has to count before it can write its own.

    Few shapes on purpose: each is a compiled kernel that a server must have ready. The bounds were measured on an
    H200 with windows of 128, pages of 64 and contexts of 128k.
    """
    width_chunk, few_warps = (128, 1) if width <= 128 else (256, 4)
    page_chunk = 4 if max_pages <= 4 else 16
    if num_tokens <= 32:
        return LaunchShape(1, 32, page_chunk, width_chunk, 1024, few_warps)
    if num_tokens <= 64:
        return LaunchShape(1, 64, page_chunk, width_chunk, 1024, 4)
    if num_tokens <= 512:
        return LaunchShape(2, 256, page_chunk, width_chunk, 1024, 8)
    # Many rows by many pages at a time would spill registers.
    return LaunchShape(8, 1024 if page_chunk == 4 else 256, page_chunk, width_chunk, 1024, 8)


def interpreter_shape(num_tokens: int, width: int, max_pages: int, lens_tail: int) -> LaunchShape:
    """The shape for Triton's interpreter, which pays for each program and each operation, hardly for the elements."""
    return LaunchShape(
        rows_per_program=min(512, _power_of_two(num_tokens)),
        count_rows=min(512, _power_of_two(num_tokens)),
        page_chunk=min(256, _power_of_two(max_pages)),
        width_chunk=min(1024, _power_of_two(width)),
        tail_chunk=min(16384, _power_of_two(lens_tail)),
    )
