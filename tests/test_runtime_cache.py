"""The disk cache: what hits and what misses, broken entries, what an entry says; and the text of a failure."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import Fresh
from runtime_calls import prepare, prepare_in_child, prepare_noting_warnings, prepare_refused, prepare_without_rights

import deep_kernels as dk
from deep_kernels import _C

pytest_plugins = ("runtime_fixtures",)

PACKAGE = Path(dk.__file__).parent


# --- keys ------------------------------------------------------------------------------------------------


def test_key_differs_with_op_spec_target_and_options(
    no_settings: Path, nvrtc: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [prepare(), prepare(num_heads=16), prepare("sm_90a"), prepare("sm89:sm_90")]
    reports.append(dk.prepare([{"op": "fp8_fp4_mqa_logits", "num_heads": 8, "head_dim": 32}], arch="sm_89")[0])
    monkeypatch.setenv("DEEP_KERNELS_LINEINFO", "1")
    reports.append(prepare())
    assert [report["origin"] for report in reports] == ["compiled"] * 6
    assert len({report["entry"].rsplit("_", 1)[1] for report in reports}) == 6, "keys, without op and target"
    names = sorted(Path(report["file"]).name for report in reports)
    assert names == sorted(os.listdir(no_settings))
    assert all(re.fullmatch(r"dk_mqa_\w+_sm_\d+a?_[0-9a-f]{16}-nvrtc\d+\.\d+\.dk", name) for name in names)


def test_key_ignores_what_the_spec_does_not_hold(no_settings: Path, nvrtc: tuple[str, str]) -> None:
    case = {"op": "fp8_fp4_mqa_logits", "head_dim": 32, "logits_dtype": "bfloat16"}
    first = dk.prepare([case | {"num_heads": 5}], arch="sm_89")[0]
    assert first["origin"] == "compiled"
    for same in (
        {"num_heads": 8},
        {"num_heads": 6, "weights_dtype": "float16"},
        {"num_heads": 7, "compressed": True, "max_seqlen_k": 4096},
        {"num_heads": 8, "reduction": "folded"},
    ):
        again = dk.prepare([case | same], arch="sm_89")[0]
        assert (again["origin"], again["entry"]) == ("cache", first["entry"])


def test_nvrtc_version_is_part_of_the_name(fresh: Fresh, shim: dict[str, str], warm: Path) -> None:
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(warm.parent)}
    assert fresh.run(prepare_in_child, env=env)["origin"] == "cache"
    other = fresh.run(prepare_in_child, env=env | {"SHIM_VERSION": "77.3"})
    assert other["origin"] == "compiled"
    assert other["file"] == str(warm.with_name(f"{warm.name.split('-')[0]}-nvrtc77.3.dk"))


@pytest.fixture(scope="module")
def package_copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fresh, Path]]:
    """A server over a copy of the package, and the copy's include folder. Children read that at first use."""
    root = tmp_path_factory.mktemp("elsewhere")
    ignored = shutil.ignore_patterns("__pycache__")
    package = Path(shutil.copytree(PACKAGE, root / "deep_kernels", ignore=ignored, copy_function=shutil.copyfile))
    server = Fresh(root)
    yield server, package / "include" / "deep_kernels"
    server.close()


def test_key_ignores_folders_times_and_users(package_copy: tuple[Fresh, Path], warm: Path, tmp_path: Path) -> None:
    server, include = package_copy
    for number, path in enumerate(sorted(include.rglob("*"))):
        os.utime(path, (1000 * number, 1000 * number))
    env = {"DEEP_KERNELS_CACHE_DIR": str(warm.parent), "HOME": str(tmp_path), "USER": "somebody", "LANG": "tr_TR"}
    report = server.run(prepare_in_child, env=env, cwd=tmp_path)
    assert (report["origin"], report["file"]) == ("cache", str(warm))


def test_headers_may_be_links_into_an_installers_store(
    package_copy: tuple[Fresh, Path], warm: Path, tmp_path: Path
) -> None:
    server, include = package_copy
    kept = shutil.move(include, tmp_path / "kept")
    try:
        store = shutil.copytree(kept, tmp_path / "store")
        (include / "contract").mkdir(parents=True)
        for name in os.listdir(store / "contract"):  # links to files in one folder
            (include / "contract" / name).symlink_to(store / "contract" / name)
        for name in ("kernels", "ptx", "tile"):  # and links to folders
            (include / name).symlink_to(store / name)
        (include / "tile" / "loop").symlink_to(store)
        (store / "loop").symlink_to(store)
        report = server.run(prepare_in_child, env={"DEEP_KERNELS_CACHE_DIR": str(warm.parent)})
        assert report["origin"] == "compiled", "more headers, another digest; but no endless loop"
        (store / "loop").unlink()
        (include / "tile" / "loop").unlink()
        report = server.run(prepare_in_child, env={"DEEP_KERNELS_CACHE_DIR": str(warm.parent)})
        assert (report["origin"], report["file"]) == ("cache", str(warm))
    finally:
        shutil.rmtree(include)
        shutil.move(kept, include)


def test_headers_of_the_working_folder_are_not_found(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    for name in ("contract/types.h", "contract/mqa_logits.h", "kernels/mqa_schedule.cuh", "ptx/base.cuh"):
        path = tmp_path / "deep_kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#error of the working folder\n")
    report = fresh.run(prepare_in_child, env={"DEEP_KERNELS_CACHE_DIR": tmp_path / "cache"}, cwd=tmp_path)
    assert report["origin"] == "compiled"


def test_a_changed_header_changes_the_key(package_copy: tuple[Fresh, Path], warm: Path) -> None:
    server, include = package_copy
    header = include / "tile" / "pipeline.cuh"  # which this kernel does not even include
    text = header.read_text()
    header.write_text(text + "\n// one comment more\n")
    try:
        report = server.run(prepare_in_child, env={"DEEP_KERNELS_CACHE_DIR": str(warm.parent)})
    finally:
        header.write_text(text)
    assert report["origin"] == "compiled"
    assert report["file"] != str(warm)


# --- a compile failure is one exception ------------------------------------------------------------------


def pickled_compile_error() -> list[str]:
    with pytest.raises(dk.CompileError) as error:
        dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")
    return [str(error.value), pickle.dumps(error.value).hex()]


def test_compile_error_tells_everything(
    package_copy: tuple[Fresh, Path], tmp_path: Path, nvrtc: tuple[str, str]
) -> None:
    server, include = package_copy
    header = include / "kernels" / "mqa_schedule.cuh"
    text = header.read_text()
    header.write_text(text + "\nint broken = no_such_name;\n")
    try:
        message, pickled = server.run(pickled_compile_error, env={"DEEP_KERNELS_CACHE_DIR": tmp_path / "cache"})
    finally:
        header.write_text(text)
    lines = message.split("\n")
    assert lines[0] == "compiling mqa_schedule for sm_89 failed"
    assert lines[1] == "spec: backend=sm89 num_heads=8"
    assert lines[2] == f"options: {' '.join(_C.compile_options('sm_89'))}"
    assert lines[3] == f"NVRTC {nvrtc[1]} at {nvrtc[0]}"
    assert "NVRTC_ERROR_COMPILATION" in message
    assert "mqa_schedule.cuh(" in message
    assert 'identifier "no_such_name" is undefined' in message
    assert '\n   1 | #include "deep_kernels/kernels/mqa_schedule.cuh"\n   2 | ' in message
    assert re.search(r"\n +\d+ \| dk_mqa_schedule_sm_89_[0-9a-f]{16}\(", message)
    again = pickle.loads(bytes.fromhex(pickled))
    assert type(again) is dk.CompileError
    assert str(again) == message
    assert not (tmp_path / "cache").exists(), "a failure leaves nothing behind"


def test_missing_headers_are_one_sentence(package_copy: tuple[Fresh, Path], tmp_path: Path) -> None:
    server, include = package_copy
    kept = shutil.move(include, tmp_path / "kept")
    try:
        message = server.run(prepare_refused, env={"DEEP_KERNELS_CACHE_DIR": tmp_path / "cache"})
    finally:
        shutil.move(kept, include)
    assert message == f"the device headers are missing from {include.parent}"


# --- broken entries --------------------------------------------------------------------------------------

HEADER_BYTES = 56  # magic 8, schema 4, three lengths 4 each, digest 32
ABOUT_BYTES = 12  # where the lengths begin


def sections(data: bytes) -> tuple[int, int, int]:
    about, source, cubin = (int.from_bytes(data[i : i + 4], "little") for i in range(ABOUT_BYTES, ABOUT_BYTES + 12, 4))
    assert len(data) == HEADER_BYTES + about + source + cubin
    return HEADER_BYTES + about, HEADER_BYTES + about + source, len(data)


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


def shift_about(data: bytes) -> bytes:
    """Lengths whose sum is right: about longer by one byte, source shorter."""
    about, source = (int.from_bytes(data[i : i + 4], "little") for i in (ABOUT_BYTES, ABOUT_BYTES + 4))
    lengths = (about + 1).to_bytes(4, "little") + (source - 1).to_bytes(4, "little")
    return data[:ABOUT_BYTES] + lengths + data[ABOUT_BYTES + 8 :]


BREAKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "truncated header"),
    "in the header": (lambda data: data[:20], "truncated header"),
    "after the header": (lambda data: data[:HEADER_BYTES], "0 bytes of content"),
    "in about": (lambda data: data[: HEADER_BYTES + 10], "10 bytes of content"),
    "in the source": (lambda data: data[: sections(data)[0] + 10], "bytes of content"),
    "before the cubin": (lambda data: data[: sections(data)[1]], "bytes of content"),
    "last byte lost": (lambda data: data[:-1], "bytes of content"),
    "one byte more": (lambda data: data + b"\0", "bytes of content"),
    "magic": (lambda data: flip(data, 3), "not an entry of deep_kernels"),
    "future schema": (lambda data: data[:8] + (99).to_bytes(4, "little") + data[12:], "schema 99, expected"),
    "about length": (lambda data: flip(data, ABOUT_BYTES), "bytes of content"),
    "source length": (lambda data: flip(data, ABOUT_BYTES + 7), "bytes of content"),
    "shifted lengths": (shift_about, "does not match its digest"),
    "digest": (lambda data: flip(data, HEADER_BYTES - 1), "does not match its digest"),
    "about": (lambda data: flip(data, HEADER_BYTES + 5), "does not match its digest"),
    "source": (lambda data: flip(data, sections(data)[0] + 5), "does not match its digest"),
    "cubin": (lambda data: flip(data, sections(data)[1] + 5), "does not match its digest"),
    "last byte": (lambda data: flip(data, len(data) - 1), "does not match its digest"),
    "foreign": (lambda data: b"\x7fELF" + bytes(1000), "not an entry of deep_kernels"),
    "zeros": (lambda data: bytes(len(data)), "not an entry of deep_kernels"),
}


def assert_miss_and_repair(file: Path, reason: str) -> None:
    report, messages = prepare_noting_warnings()
    assert report["origin"] == "compiled"
    assert len(messages) == 1, messages
    assert messages[0].startswith(f"deep_kernels: ignoring the cache entry {file}: ")
    assert reason in messages[0]
    assert prepare_noting_warnings() == (prepare() | {"origin": "cache", "seconds": pytest.approx(0, abs=5)}, [])
    assert [path for path in file.parent.iterdir() if path.name.startswith(".writing")] == []


@pytest.mark.parametrize("kind", BREAKS)
def test_broken_entry_is_a_miss_and_is_repaired(warm: Path, kind: str) -> None:
    change, reason = BREAKS[kind]
    warm.write_bytes(change(warm.read_bytes()))
    assert_miss_and_repair(warm, reason)


def test_entry_under_anothers_name_is_a_miss(warm: Path) -> None:
    other = Path(prepare(num_heads=16)["file"])
    shutil.copy(other, warm)
    assert_miss_and_repair(warm, "holds another kernel than its name says")


def test_folder_in_an_entrys_place_is_moved_aside(warm: Path) -> None:
    warm.unlink()
    warm.mkdir()
    (warm / "precious").write_text("of somebody")
    assert_miss_and_repair(warm, "Is a directory")
    (moved,) = (path for path in warm.parent.iterdir() if path.is_dir())
    assert (moved / "precious").read_text() == "of somebody"


def test_pipe_in_an_entrys_place_does_not_block(warm: Path) -> None:
    warm.unlink()
    os.mkfifo(warm)
    assert_miss_and_repair(warm, "not supported")


def test_socket_in_an_entrys_place(warm: Path) -> None:
    warm.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(warm.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/{warm.name}")  # the full path is too long for a socket
        os.close(folder)
        assert_miss_and_repair(warm, "No such device or address")


def test_enormous_file_in_an_entrys_place_is_not_read(warm: Path) -> None:
    os.truncate(warm, 1 << 40)  # sparse
    assert_miss_and_repair(warm, "too large")


def test_links_in_an_entrys_place(warm: Path, tmp_path: Path) -> None:
    real = shutil.move(warm, tmp_path / warm.name)
    warm.symlink_to(real)
    assert prepare()["origin"] == "cache", "a link to an entry is one"
    warm.unlink()
    warm.symlink_to(warm)
    assert_miss_and_repair(warm, "symbolic links")
    warm.unlink()
    warm.symlink_to(tmp_path / "nowhere")
    report, messages = prepare_noting_warnings()
    assert (report["origin"], messages) == ("compiled", []), "a link to nothing is a missing file"
    assert stat.S_ISREG(warm.lstat().st_mode)
    assert not (tmp_path / "nowhere").exists()


def test_unreadable_entry_is_a_miss_and_is_repaired(fresh: Fresh, open_folder: Path, entry: dict[str, Any]) -> None:
    file = Path(shutil.copy(entry["file"], open_folder))
    file.chmod(0)
    result = fresh.run(prepare_without_rights, env={"DEEP_KERNELS_CACHE_DIR": open_folder})
    assert [report["origin"] for report in result["reports"]] == ["compiled", "cache"]
    assert result["warnings"] == [f"deep_kernels: ignoring the cache entry {file}: Permission denied"]


# --- what an entry says ----------------------------------------------------------------------------------


def test_entry_tells_what_it_is(entry: dict[str, Any], nvrtc: tuple[str, str]) -> None:
    about = json.loads(entry["about"])
    content = _C.read_entry(entry["file"])
    assert content["about"] == entry["about"]
    assert about["entry"] == entry["entry"]
    assert (about["op"], about["target"]) == ("mqa_schedule", "sm_89")
    assert about["spec"] == {"backend": "sm89", "num_heads": 8}
    assert about["options"] == _C.compile_options("sm_89")
    assert about["nvrtc"] == nvrtc[1]
    assert about["include_digest"] == _C.include_digest()
    assert 0 < about["compile_seconds"] < 60
    assert content["cubin"].startswith(b"\x7fELF")
    assert f"{about['entry']}(".encode() in content["source"].encode()
    assert about["entry"].encode() in content["cubin"], "the symbol that the driver looks for"
