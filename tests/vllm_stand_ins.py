"""What `build` needs of vLLM 0.33.0, in small: the same fields and functions, without vLLM.

tests/test_vllm.py, where vLLM is installed, holds them to the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from swa_decode_meta.spec import Batch

UTILS = "vllm.v1.attention.backends.utils"
LAYER_TYPES = ("swaonly", "c4a", "c128a", "c1a", "c2a")


@dataclass
class CommonAttentionMetadata:
    """vLLM's batch, as far as `build` reads it."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    _token_to_req_indices_cache: torch.Tensor | None = None

    def token_to_req_indices(self, buffer: torch.Tensor) -> torch.Tensor:
        """The request of each token; made once for all groups."""
        if self._token_to_req_indices_cache is None:
            lengths = self.query_start_loc[1:] - self.query_start_loc[:-1]
            found = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
            buffer[: len(found)] = found
            buffer[len(found) : self.num_actual_tokens] = 0
            self._token_to_req_indices_cache = buffer
        return self._token_to_req_indices_cache[: self.num_actual_tokens]


@dataclass
class DeepseekSparseSWAMetadata:
    """vLLM's metadata of all platforms."""

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    query_start_loc_cpu: torch.Tensor | None = None
    is_valid_token: torch.Tensor | None = None
    token_to_req_indices: torch.Tensor | None = None
    decode_swa_indices: torch.Tensor | None = None
    decode_swa_lens: torch.Tensor | None = None
    decode_swa_width: int = 0
    prefill_swa_indices: torch.Tensor | None = None
    prefill_swa_lens: torch.Tensor | None = None
    prefill_left_visible: torch.Tensor | None = None
    prefill_right_visible: torch.Tensor | None = None
    replay_start: torch.Tensor | None = None
    cache_slot_mapping: torch.Tensor | None = None
    cache_positions: torch.Tensor | None = None
    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    max_decode_query_len: int = 1
    flashinfer_decode_topk_lens: torch.Tensor | None = None
    flashinfer_decode_seq_lens: torch.Tensor | None = None
    prefill_seq_lens: torch.Tensor | None = None
    prefill_seq_lens_cpu: torch.Tensor | None = None
    prefill_gather_lens: torch.Tensor | None = None
    prefill_query_lens_cpu: torch.Tensor | None = None
    prefill_window_size: int = 0
    prefill_max_model_len: int = 0
    prefill_max_num_batched_tokens: int = 0
    tile_sched_swaonly: Any = None
    tile_sched_c4a: Any = None
    tile_sched_c128a: Any = None
    tile_sched_c1a: Any = None
    tile_sched_c2a: Any = None
    flashinfer_sparse_index_cache: dict[str, Any] = field(default_factory=dict)


class Builder:
    """vLLM's DeepseekSparseSWAMetadataBuilder, as far as `build` reads it. `fill` gives it its buffers."""

    window_size = block_size = decode_threshold = noncausal_index_width = 0

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
        """None for each layer type, as on ROCm."""
        return dict.fromkeys(LAYER_TYPES)

    def _build_deepseek_v4_metadata(
        self,
        num_decodes: int,
        num_prefills: int,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None,
        query_start_loc: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        replay_start: torch.Tensor,
    ) -> dict[str, Any]:
        """Nothing, without prefills."""
        assert num_prefills == 0
        return {}


def split_decodes_and_prefills(common_attn_metadata: Any, decode_threshold: int = 1) -> tuple[int, int, int, int]:
    """Requests and tokens of the requests up to the first that is too long, and those from it on."""
    cam = common_attn_metadata
    lengths = (cam.query_start_loc_cpu[1:] - cam.query_start_loc_cpu[:-1]).tolist()
    if cam.max_query_len <= decode_threshold:
        return cam.num_reqs, 0, cam.num_actual_tokens, 0
    first = next((n for n, length in enumerate(lengths) if length > decode_threshold), len(lengths))
    tokens = int(cam.query_start_loc_cpu[first])
    return first, cam.num_reqs - first, tokens, cam.num_actual_tokens - tokens


def modules() -> Mapping[str, ModuleType]:
    """The modules of vLLM that `build` imports, made of the stand-ins."""
    utils: Any = ModuleType(UTILS)
    utils.split_decodes_and_prefills = split_decodes_and_prefills
    parents = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    return {**{name: sys.modules.get(name) or ModuleType(name) for name in parents}, UTILS: utils}


# ------------------------------------------------------------ for either


def with_ragged(base: type) -> type:
    """The ROCm metadata class over the one of all platforms."""

    @dataclass
    class RocmMetadata(base):  # type: ignore[misc, valid-type]
        decode_swa_ragged_indices: torch.Tensor | None = None
        decode_swa_ragged_indptr: torch.Tensor | None = None
        prefill_swa_ragged_indices: torch.Tensor | None = None
        prefill_swa_ragged_indptr: torch.Tensor | None = None

    return RocmMetadata


def fill(
    builder: Any, batch: Batch, max_tokens: int = 64, dspark: bool = True, device: str = "cpu", threshold: int = 6
) -> Any:
    """Give a builder, made without its __init__, the buffers that it would have."""

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, 7, device=device).to(dtype)

    width = max(batch.width, 192)
    values = {
        "window_size": batch.window_size,
        "block_size": batch.block_size,
        "decode_threshold": threshold,
        "is_dspark": dspark,
        "noncausal_index_width": width if dspark else 0,
        "decode_swa_indices": made(max_tokens, 1, batch.window_size),
        "decode_swa_indices_noncausal": None,
        "decode_swa_lens": made(max_tokens),
        "is_valid_token": made(max_tokens, dtype=torch.bool),
        "token_to_req_indices": made(max_tokens),
        "no_replay_start": torch.zeros(max_tokens + 1, dtype=torch.int32, device=device),
        "decode_swa_ragged_indices_buffer": made(max_tokens * width),
        "decode_swa_ragged_indptr_buffer": made(max_tokens + 1),
        "_max_tokens": max_tokens,
        "device": torch.device(device),
    }
    for name, value in values.items():
        setattr(builder, name, value)
    return builder


def batch_of(kind: type, batch: Batch, device: str = "cpu", **changes: Any) -> Any:
    """A batch as vLLM's class `kind` has it."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in batch.inputs().items()}
    lengths = np.diff(batch.query_start_loc)
    given = {
        "query_start_loc": tensors["query_start_loc"].to(device),
        "query_start_loc_cpu": tensors["query_start_loc"],
        "seq_lens": tensors["seq_lens"].to(device),
        "num_reqs": batch.num_reqs,
        "num_actual_tokens": batch.num_tokens,
        "max_query_len": int(lengths.max(initial=0)),
        "max_seq_len": int(batch.seq_lens.max(initial=0)),
        "block_table_tensor": tensors["block_table"].to(device),
        "slot_mapping": tensors["slot_mapping"].to(device),
        "causal": not batch.noncausal,
        "seq_lens_cpu_upper_bound": tensors["seq_lens"],
        "_token_to_req_indices_cache": tensors["token_to_req"].to(device),
    }
    return kind(**{**given, **changes})
