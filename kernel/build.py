"""vLLM's `build`: the ROCm SWA metadata of a decode batch, from one launch. Imports vLLM when it is called."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch

from ..spec import ArgumentError, BackendError, brief
from .binding import Group
from .deferred import submit

MAX_ROWS = 16384
"""The most rows of a batch that `build` takes: vLLM's largest max_num_batched_tokens for DeepSeek-V4.1-Flash."""

SWITCH = "SWA_DECODE_META"
"""The environment variable that switches `build` on ("1") or off ("0") whatever the GPU and vLLM's own flag say."""

VLLM = "0.33"
"""The release of vLLM whose classes `build` knows."""

_BUILDER = (
    "decode_threshold",
    "is_dspark",
    "window_size",
    "block_size",
    "noncausal_index_width",
    "is_valid_token",
    "token_to_req_indices",
    "decode_swa_indices",
    "decode_swa_indices_noncausal",
    "decode_swa_lens",
    "decode_swa_ragged_indices_buffer",
    "decode_swa_ragged_indptr_buffer",
    "no_replay_start",
    "build_tile_scheduler",
    "_build_deepseek_v4_metadata",
    "_max_tokens",
    "device",
)
_BATCH = (
    "causal",
    "slot_mapping",
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu_upper_bound",
    "block_table_tensor",
    "max_query_len",
    "token_to_req_indices",
)
_LAYER_TYPES = ("swaonly", "c4a", "c128a", "c1a", "c2a")
_PREFILL = (
    "prefill_swa_indices",
    "prefill_swa_lens",
    "prefill_left_visible",
    "prefill_right_visible",
    "prefill_swa_ragged_indices",
    "prefill_swa_ragged_indptr",
)

_monokernel = False


class VllmMismatchError(BackendError):
    """vLLM's objects are not those that `build` knows. Names the field, and the version of vLLM that is installed."""


def record_monokernel(vllm_config: Any) -> None:
    """Note whether this process's model runs with --monokernel, as vLLM's function of that name does."""
    global _monokernel
    _monokernel = bool(vllm_config.kernel_config.monokernel)
    enabled.cache_clear()


@functools.cache
def enabled() -> bool:
    """Whether `build` takes batches: with --monokernel on gfx942, or as SWITCH says. Raises ArgumentError."""
    forced = switch()
    return (_monokernel and on_gfx942()) if forced is None else forced


def switch() -> bool | None:
    """What SWITCH says; None where it is not set. Raises ArgumentError for anything but 0 and 1."""
    value = os.environ.get(SWITCH)
    if value not in (None, "", "0", "1"):
        raise ArgumentError(SWITCH, "0 or 1", brief(value))
    return None if not value else value == "1"


def on_gfx942() -> bool:
    """Whether torch's first GPU is a gfx942."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return False
    return bool(torch.cuda.get_device_properties(0).gcnArchName.startswith("gfx942"))


def build(
    builder: Any,
    common_prefix_len: int,
    cam: Any,
    fast_build: bool,
    replay_start: torch.Tensor | None,
    metadata_cls: type,
) -> Any:
    """The ROCm SWA metadata of a decode batch as `metadata_cls`, or None for what vLLM's own build must do.

    builder: vLLM's DeepseekV41ROCMAiterSparseSWAMetadataBuilder, whose persistent buffers are written and whose views
    are given back. cam: CommonAttentionMetadata. replay_start: int32 [>= requests], or None where nothing replays.
    common_prefix_len and fast_build change nothing, as in vLLM.

    None: when not `enabled()`; for a non-causal batch of a builder that is not DSpark's; with prefill tokens, without
    decode tokens, with more than MAX_ROWS of them, or with a slot_mapping of another length; when the index buffer is
    not as wide as the builder says, or the longest query does not fit the DSpark width.
    Raises VllmMismatchError when a field is missing or new, before anything is written; what `launch` raises, too.
    """
    if not enabled():
        return None
    mine, batch = _read("builder", builder, _BUILDER), _read("cam", cam, _BATCH)
    noncausal = not batch.causal
    if noncausal and not mine.is_dspark:
        return None
    split = vllm("vllm.v1.attention.backends.utils", "split_decodes_and_prefills")
    counts = split(cam, decode_threshold=mine.decode_threshold)
    num_decodes, num_prefills, num_tokens, num_prefill_tokens = counts
    if num_prefill_tokens > 0 or not 0 < num_tokens <= MAX_ROWS or batch.slot_mapping.shape[0] != num_tokens:
        return None
    width = mine.noncausal_index_width if noncausal else mine.window_size
    if noncausal and mine.window_size + batch.max_query_len > width:
        return None  # a row's window and its block would not fit; vLLM would cut them
    indices = _indices(builder, mine, noncausal, width)
    if indices.shape[-1] != width:
        return None

    given = replay_start
    if replay_start is None:
        replay_start = mine.no_replay_start
    group = Group(
        slot_mapping=batch.slot_mapping,
        is_valid=mine.is_valid_token[:num_tokens],
        indices=indices,
        lens=mine.decode_swa_lens,
        ragged=mine.decode_swa_ragged_indices_buffer,
        indptr=mine.decode_swa_ragged_indptr_buffer,
        block_table=batch.block_table_tensor,
        block_size=mine.block_size,
    )
    token_to_req = batch.token_to_req_indices(mine.token_to_req_indices)
    schedules = mine.build_tile_scheduler(num_tokens)
    values = {
        "seq_lens": batch.seq_lens,
        "query_start_loc": batch.query_start_loc,
        "query_start_loc_cpu": batch.query_start_loc_cpu,
        "block_table": batch.block_table_tensor,
        "slot_mapping": batch.slot_mapping,
        "is_valid_token": group.is_valid,
        "token_to_req_indices": token_to_req,
        "decode_swa_indices": indices[:num_tokens],
        "decode_swa_lens": mine.decode_swa_lens[:num_tokens],
        "decode_swa_width": width,
        "decode_swa_ragged_indices": mine.decode_swa_ragged_indices_buffer[: max(num_tokens * width, 1)],
        "decode_swa_ragged_indptr": mine.decode_swa_ragged_indptr_buffer[: num_tokens + 1],
        **dict.fromkeys(_PREFILL),
        "replay_start": replay_start,
        "block_size": mine.block_size,
        "num_decodes": num_decodes,
        "num_prefills": num_prefills,
        "num_decode_tokens": num_tokens,
        "num_prefill_tokens": num_prefill_tokens,
        "max_decode_query_len": min(batch.max_query_len, mine.decode_threshold),
        **{f"tile_sched_{kind}": _schedule(schedules, kind) for kind in _LAYER_TYPES},
        **mine._build_deepseek_v4_metadata(
            num_decodes,
            num_prefills,
            batch.seq_lens,
            batch.seq_lens_cpu_upper_bound,
            batch.query_start_loc,
            batch.query_start_loc_cpu,
            replay_start,
        ),
    }
    _check_fields(metadata_cls, values)
    shared = (batch.query_start_loc, batch.seq_lens, token_to_req, replay_start)
    submit(group, shared, num_tokens, mine.window_size, noncausal, replays=given is not None)
    return metadata_cls(**values)


def _indices(builder: Any, mine: SimpleNamespace, noncausal: bool, width: int) -> torch.Tensor:
    """The dense index buffer of the batch's form; the non-causal one is made by the first batch that needs it."""
    if not noncausal:
        indices: torch.Tensor = mine.decode_swa_indices
        return indices
    if mine.decode_swa_indices_noncausal is None:
        shape = (mine._max_tokens, 1, width)
        builder.decode_swa_indices_noncausal = torch.zeros(shape, dtype=torch.int32, device=mine.device)
    made: torch.Tensor = builder.decode_swa_indices_noncausal
    return made


# ------------------------------------------------------------ what is expected of vLLM


def _read(what: str, source: Any, names: Sequence[str]) -> SimpleNamespace:
    """The attributes of one of vLLM's objects."""
    found = SimpleNamespace()
    for name in names:
        try:
            setattr(found, name, getattr(source, name))
        except AttributeError:
            raise mismatch(f"{what}.{name}: expected as in vLLM {VLLM}, got none") from None
    return found


def vllm(module: str, name: str = "") -> Any:
    """A module of vLLM's, or what it calls `name`. Raises VllmMismatchError."""
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError):
        raise mismatch(f"{module}.{name}".rstrip(".") + f": expected as in vLLM {VLLM}, got none") from None


def _schedule(schedules: Mapping[str, Any], kind: str) -> Any:
    try:
        return schedules[kind]
    except (KeyError, TypeError):
        raise mismatch(f"builder.build_tile_scheduler(): expected an entry {kind!r}, got none") from None


def _check_fields(metadata_cls: type, values: Mapping[str, Any]) -> None:
    """Raise VllmMismatchError unless the class has all these fields and needs no others."""
    if not is_dataclass(metadata_cls):
        raise mismatch(f"metadata_cls: expected a dataclass, got {brief(metadata_cls)}")
    known = {item.name for item in fields(metadata_cls) if item.init}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise mismatch(f"{metadata_cls.__name__}.{unknown[0]}: expected as in vLLM {VLLM}, got none")
    given = dict.fromkeys(values)
    for item in fields(metadata_cls):
        if item.init and item.name not in given and _is_required(item):
            raise mismatch(f"{metadata_cls.__name__}.{item.name}: not of vLLM {VLLM}, and it has no default")


def _is_required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def mismatch(words: str) -> VllmMismatchError:
    """The error that says `words`, and which vLLM this is."""
    return VllmMismatchError(f"{words}; the vLLM here is {vllm_version()}")


def vllm_version() -> str:
    """The version of the installed vLLM, or "not installed"."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "not installed"
