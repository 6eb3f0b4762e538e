"""Calls of the runtime that several tests make: here, or by their text in children of tests/fresh.py."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from fresh import SCHEDULE, drop_root

import deep_kernels as dk
from deep_kernels import _C


def prepare(arch: str = "sm_89", **case: Any) -> dict[str, Any]:
    """The report of the schedule at 8 heads, or with other fields."""
    return dk.prepare([SCHEDULE | case], arch=arch)[0]


def prepare_noting_warnings() -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = prepare()
    assert all(warning.category is RuntimeWarning for warning in caught)
    return report, [str(warning.message) for warning in caught]


# --- in children: `dk` and `_C` are there as they are here ------------------------------------------------


def prepare_in_child() -> dict[str, Any]:
    """The report of the schedule at 8 heads, and the warnings that it took."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0]
    return report | {"warnings": [str(warning.message) for warning in caught]}


def prepare_refused() -> str:
    """The sentence of its CompileError."""
    with pytest.raises(dk.CompileError) as error:
        dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")
    return str(error.value)


def prepare_without_rights() -> dict[str, Any]:
    """Two reports, and all warnings, of a user to whom file permissions apply."""
    _C.include_digest()  # read before: the package may lie where only root may look
    _C.nvrtc()
    drop_root()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = [dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0] for _ in range(2)]
    return {"reports": reports, "warnings": [str(warning.message) for warning in caught]}
