"""Compiled kernels on disk: finding them, what is known of each, and their source, PTX and machine code."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _C

_FACTS = {
    *("entry", "op", "target", "spec", "options", "nvrtc", "include_digest", "registers", "compile_seconds"),
    *("spill_store_bytes", "spill_load_bytes", "spill_limit_bytes", "wgmma_serialized", "num_wgmma"),
}


class InspectorError(Exception):
    """One sentence for the user of the command line."""


@dataclass(frozen=True)
class Entry:
    """A compiled kernel on disk; `fault` says what is wrong with the file, and the rest is empty then."""

    file: Path
    about: dict[str, Any]
    source: str
    cubin: bytes
    fault: str

    @property
    def name(self) -> str:
        """dk_<op>_<target>_<key>-nvrtc<version>"""
        return self.file.stem

    @property
    def key(self) -> str:
        return self.name.split("-")[0].rsplit("_", 1)[-1]

    def spec(self) -> str:
        """The Spec in short: words as they are, numbers with their names."""
        fields: dict[str, Any] = self.about["spec"]
        return " ".join(value if isinstance(value, str) else f"{name}={value}" for name, value in fields.items())


def spilled_bytes(about: Mapping[str, Any]) -> int:
    """What a Spec's spill limit is compared with. What is stored is loaded again: only one of the two counts."""
    return max(int(about["spill_store_bytes"]), int(about["spill_load_bytes"]))


def read_entry(file: Path) -> Entry:
    try:
        content = _C.read_entry(file)
        about = json.loads(content["about"])
    except ValueError as error:
        return Entry(file, {}, "", b"", str(error).removeprefix(f"{file}: "))
    if missing := _FACTS - about.keys():
        return Entry(file, {}, "", b"", f"made by another version: it lacks {', '.join(sorted(missing))}")
    return Entry(file, about, content["source"], content["cubin"], "")


def folders() -> dict[str, Path]:
    """The folders that calls ask, in their order."""
    prebuilt = _C.prebuilt_dir()
    return ({"prebuilt": Path(prebuilt)} if prebuilt else {}) | {"cache": Path(_C.cache_dir())}


def entry_files() -> dict[Path, str]:
    """Files of all entries, and the folder's name; the same file in both folders is the one that calls use."""
    found: dict[str, tuple[Path, str]] = {}
    for place, folder in folders().items():
        for file in map(Path, _C.cache_files(folder)):
            found.setdefault(file.name, (file, place))
    return dict(found.values())


def find_entry(key: str) -> Entry:
    """The entry whose name contains `key`."""
    files = [file for file in entry_files() if key in file.stem]
    if not files:
        places = " or ".join(str(folder) for folder in folders().values())
        raise InspectorError(f"no entry in {places} has '{key}' in its name")
    if len(files) > 1:
        names = ", ".join(file.stem for file in files[:4]) + (", ..." if len(files) > 4 else "")
        raise InspectorError(f"{len(files)} entries have '{key}' in their names: {names}")
    entry = read_entry(files[0])
    if entry.fault:
        raise InspectorError(f"{entry.file}: {entry.fault}")
    return entry


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


def total_size(files: list[Path]) -> int:
    """Bytes of the files that can be seen; one that vanishes meanwhile counts nothing."""
    total = 0
    for file in files:
        try:
            total += file.lstat().st_size
        except OSError:
            continue
    return total


def list_table() -> list[list[str]]:
    """Rows of `list`, the header first."""
    rows = [["key", "op", "target", "spec", "registers", "spills", "size", "seconds", "folder"]]
    for file, place in entry_files().items():
        entry = read_entry(file)
        about = entry.about
        if entry.fault:
            rows.append([entry.key, "-", "-", f"broken: {entry.fault}", "-", "-", "-", "-", place])
            continue
        numbers = [str(about["registers"]), str(spilled_bytes(about)), size_text(total_size([file]))]
        seconds = f"{about['compile_seconds']:.2f}"
        rows.append([entry.key, about["op"], about["target"], entry.spec(), *numbers, seconds, place])
    return rows


def aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def describe_entry(entry: Entry) -> str:
    """Everything about one entry, a fact a line."""
    about = entry.about
    current = about["include_digest"] == _C.include_digest()
    store, load, limit = (about[f"spill_{word}"] for word in ("store_bytes", "load_bytes", "limit_bytes"))
    rows = [
        ["entry", about["entry"]],
        ["file", str(entry.file)],
        ["size", f"{size_text(total_size([entry.file]))}, machine code {size_text(len(entry.cubin))}"],
        ["op", about["op"]],
        ["target", about["target"]],
        *([f"  {name}", str(value)] for name, value in about["spec"].items()),
        ["options", " ".join(about["options"])],
        ["NVRTC", about["nvrtc"]],
        ["headers", f"{about['include_digest']} ({'as installed' if current else 'not those installed now'})"],
        ["registers", str(about["registers"])],
        ["spills", f"{store} bytes stored, {load} loaded, {limit} allowed"],
        ["wgmma", f"{about['num_wgmma']} expected, {'serialized' if about['wgmma_serialized'] else 'not serialized'}"],
        ["compiled in", f"{about['compile_seconds']:.2f} s"],
    ]
    return aligned(rows)


def ptx(entry: Entry) -> tuple[str, list[str]]:
    """PTX of the stored source, compiled anew, and why it may not be what the entry was made of."""
    notes = []
    if entry.about["include_digest"] != _C.include_digest():
        notes.append("the headers have changed since the entry was made: this is PTX of the headers installed now")
    version = _C.nvrtc()[1]
    if entry.about["nvrtc"] != version:
        notes.append(f"the entry was made by NVRTC {entry.about['nvrtc']}: this is PTX of NVRTC {version}")
    ok, text, log = _C.compile_to_ptx(entry.source, entry.about["options"])
    if not ok:
        raise InspectorError(f"{entry.name} does not compile any more: {log}")
    return text, notes


def disassembler() -> Path | None:
    """nvdisasm or cuobjdump, of the triton package that comes with torch or on the PATH."""
    spec = importlib.util.find_spec("triton")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for name in ("nvdisasm", "cuobjdump"):
        for root in roots:
            path = Path(root) / "backends" / "nvidia" / "bin" / name
            if os.access(path, os.X_OK):
                return path
        if found := shutil.which(name):
            return Path(found)
    return None


def sass(entry: Entry) -> str:
    tool = disassembler()
    if tool is None:
        raise InspectorError("machine code needs nvdisasm or cuobjdump, of the package triton or on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / f"{entry.name}.cubin"
        cubin.write_bytes(entry.cubin)
        option = "--print-code" if tool.name == "nvdisasm" else "--dump-sass"
        done = subprocess.run([tool, option, cubin], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InspectorError(f"{tool} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
