"""How targets and the shapes of launches are named."""

from __future__ import annotations

from typing import Any

import pytest

from swa_decode_meta.fuzz.target import SHAPE_FIELDS, Target, check_shape, parse_target
from swa_decode_meta.spec import (
    ArgumentError,
)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("kernel", Target("kernel", "swa_decode_meta.kernel", "launch")),
        ("kernel@gpu", Target("kernel@gpu", "swa_decode_meta.kernel", "launch", "gpu")),
        ("a:b", Target("a:b", "a", "b")),
        ("a.b_c.d1:e_f@interpreter", Target("a.b_c.d1:e_f@interpreter", "a.b_c.d1", "e_f", "interpreter")),
    ],
)
def test_a_target_is_read_from_its_name(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kernels",
        "kernel@",
        "kernel@cuda",
        "a",
        "a:",
        ":b",
        "a:b:c",
        "a:b.c",
        "a.:b",
        "a..b:c",
        "a b:c",
        "a:1",
        "@gpu",
    ],
)
def test_a_bad_target_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ArgumentError, match="target") as caught:
        parse_target(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target",
    [
        {},
        {"shape": None},
        {"shape": {}},
        {"shape": {**dict.fromkeys(SHAPE_FIELDS, 1), "look_back": True}},
        {"shape": {"tail_chunk": 2**15}},
    ],
)
def test_a_shape_of_powers_of_two_is_accepted(target: dict[str, Any]) -> None:
    check_shape(target)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ([], "target.shape: expected an object"),
        ("x" * 10**6, "target.shape: expected an object"),
        ({"warps": 1}, "fields among"),
        ({1: 1}, "fields among"),
        ({"look_back": 1}, "target.shape.look_back"),
        *(({"num_warps": value}, r"target.shape.num_warps") for value in (0, -2, 3, 2**16, 2.0, True, "2", None, [1])),
    ],
)
def test_any_other_shape_is_refused_by_field_in_one_short_line(shape: Any, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem) as caught:
        check_shape({"shape": shape})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
