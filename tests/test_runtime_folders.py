"""Folders that cannot be used or trusted, prebuilt kernels, and doing without compiling or NVRTC."""

from __future__ import annotations

import _ctypes
import os
import re
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
from fresh import NOBODY, Fresh, file_size_limit, mount_small
from runtime_calls import prepare, prepare_in_child, prepare_noting_warnings, prepare_refused, prepare_without_rights

import deep_kernels as dk

pytest_plugins = ("runtime_fixtures",)


# --- folders that cannot be used -------------------------------------------------------------------------


def assert_memory_only(result: dict[str, Any], folder: Path, reason: str) -> None:
    assert [report["origin"] for report in result["reports"]] == ["compiled", "memory"]
    assert [report["file"] for report in result["reports"]] == ["", ""]
    assert result["warnings"] == [
        f"deep_kernels: the cache folder {folder} cannot be written ({reason}): kernels are kept in memory only"
    ]


def test_read_only_folder(fresh: Fresh, open_folder: Path, entry: dict[str, Any]) -> None:
    folder = open_folder / "cache"
    folder.mkdir(mode=0o555)
    env = {"DEEP_KERNELS_CACHE_DIR": folder}
    assert_memory_only(fresh.run(prepare_without_rights, env=env), folder, "Permission denied")
    folder.chmod(0o755)
    shutil.copy(entry["file"], folder)
    folder.chmod(0o555)
    result = fresh.run(prepare_without_rights, env=env)
    assert [report["origin"] for report in result["reports"]] == ["cache", "cache"]
    assert result["warnings"] == []


def test_folder_that_cannot_be_made(fresh: Fresh, open_folder: Path, nvrtc: tuple[str, str]) -> None:
    open_folder.chmod(0o555)
    folder = open_folder / "deep" / "cache"
    result = fresh.run(prepare_without_rights, env={"DEEP_KERNELS_CACHE_DIR": folder})
    assert_memory_only(result, folder, "Permission denied")


def test_file_where_the_folder_should_be(fresh: Fresh, open_folder: Path, nvrtc: tuple[str, str]) -> None:
    for name in ("file", "file/below"):
        folder = open_folder / name
        (open_folder / "file").write_text("mine")
        result = fresh.run(prepare_without_rights, env={"DEEP_KERNELS_CACHE_DIR": folder})
        assert_memory_only(result, folder, "Not a directory")
        assert (open_folder / "file").read_text() == "mine"


def test_missing_folder_is_made(no_settings: Path, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any]) -> None:
    folder = no_settings / "a" / "b"
    monkeypatch.setenv("DEEP_KERNELS_CACHE_DIR", str(folder))
    assert prepare()["origin"] == "compiled"
    assert os.listdir(folder) == [Path(entry["file"]).name]


def prepare_on_full_disk(num_bytes: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught, file_size_limit(num_bytes):
        warnings.simplefilter("always")
        reports = [dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0] for _ in range(2)]
    return {"reports": reports, "warnings": [str(warning.message) for warning in caught]}


def test_file_that_cannot_grow(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    result = fresh.run(prepare_on_full_disk, 5000, env={"DEEP_KERNELS_CACHE_DIR": tmp_path})
    assert_memory_only(result, tmp_path, "File too large")
    assert os.listdir(tmp_path) == [], "no half-written file stays"


def prepare_when_there_is_room_again() -> list[list[str]]:
    case = {"op": "get_mqa_logits_metadata", "num_heads": 8}
    warnings.simplefilter("ignore")
    with file_size_limit(5000):
        reports = dk.prepare([case], arch="sm_89")
    reports += [dk.prepare([case], arch="sm_89")[0] for _ in range(2)]
    return [[report["origin"], report["file"]] for report in reports]


def test_what_was_not_saved_is_saved_when_there_is_room(fresh: Fresh, tmp_path: Path, entry: dict[str, Any]) -> None:
    reports = fresh.run(prepare_when_there_is_room_again, env={"DEEP_KERNELS_CACHE_DIR": tmp_path})
    file = str(tmp_path / Path(entry["file"]).name)
    assert reports == [["compiled", ""], ["memory", file], ["cache", file]]


def prepare_on_small_disk(folder: str) -> dict[str, Any]:
    if reason := mount_small(folder, 8192):
        return {"skip": reason}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = [dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0] for _ in range(2)]
    left = os.listdir(folder)
    return {"reports": reports, "warnings": [str(warning.message) for warning in caught], "left": left}


def test_full_disk(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    result = fresh.run(prepare_on_small_disk, str(tmp_path), env={"DEEP_KERNELS_CACHE_DIR": tmp_path})
    if "skip" in result:
        pytest.skip(result["skip"])
    assert_memory_only(result, tmp_path, "No space left on device")
    assert result["left"] == []


def test_folder_names_need_not_be_text(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    reports = [fresh.run(prepare_in_child, env={"DEEP_KERNELS_CACHE_DIR": folder}) for _ in range(2)]
    assert [report["origin"] for report in reports] == ["compiled", "cache"]
    assert [Path(report["file"]) for report in reports] == list(folder.iterdir()) * 2
    message = fresh.run(prepare_refused, env={"DEEP_KERNELS_CACHE_DIR": f"{folder}2", "DEEP_KERNELS_NO_COMPILE": "1"})
    assert f"neither in memory nor in {folder}2" in message


# --- the temporary folder that stands in for HOME --------------------------------------------------------


def test_temporary_folder_is_made_for_this_user_alone(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    report = fresh.run(prepare_in_child, env={"TMPDIR": tmp_path})
    folder = tmp_path / f"deep_kernels-{os.geteuid()}"
    assert Path(report["file"]).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["writable", "link", "file", "other"])
def test_temporary_folder_of_somebody_else_is_not_trusted(
    fresh: Fresh, tmp_path: Path, entry: dict[str, Any], kind: str
) -> None:
    folder = tmp_path / f"deep_kernels-{os.geteuid()}"
    planted = tmp_path / "planted"
    planted.mkdir()
    shutil.copy(entry["file"], planted)  # would hit if it were read
    if kind == "link":
        folder.symlink_to(planted)
        reason = "it is not a folder"
    elif kind == "file":
        folder.write_text("")
        reason = "it is not a folder"
    elif kind == "writable":
        planted.rename(folder)
        folder.chmod(0o777)
        reason = "other users may write to it"
    else:
        planted.rename(folder)
        try:
            os.chown(folder, NOBODY, NOBODY)
        except PermissionError:
            pytest.skip("a folder cannot be given to somebody else")
        folder.chmod(0o755)
        reason = "it belongs to another user"
    report = fresh.run(prepare_in_child, env={"TMPDIR": tmp_path})
    assert (report["origin"], report["file"]) == ("compiled", "")
    message = f"deep_kernels: the cache folder {folder} cannot be trusted ({reason}): kernels are kept in memory only"
    assert report["warnings"] == [message]


# --- no compiling, no NVRTC, prebuilt kernels ------------------------------------------------------------


def test_no_compile_names_the_spec(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_NO_COMPILE", "1")
    monkeypatch.setenv("DEEP_KERNELS_MQA_CLEAN", "concurrent")  # whatever the table says
    with pytest.raises(dk.CompileError) as error:
        dk.prepare([{"op": "fp8_fp4_mqa_logits", "num_heads": 40, "head_dim": 64}], arch="sm_90a")
    assert str(error.value) == (
        f"mqa_logits for sm_90a is neither in memory nor in {no_settings}, and DEEP_KERNELS_NO_COMPILE=1 forbids "
        "compiling it; spec: backend=sm90 format=fp8 head_dim=64 num_heads=64 logits_dtype=float32 clean=concurrent "
        "schedule=derived kv_stages=4 reduction=exact"
    )
    assert not no_settings.exists()


def test_no_compile_is_satisfied_by_the_cache(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_NO_COMPILE", "1")
    assert prepare()["origin"] == "cache"
    monkeypatch.setenv("DEEP_KERNELS_NO_COMPILE", "0")
    assert prepare(num_heads=16)["origin"] == "compiled"


def test_no_compile_refuses_a_broken_entry(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_NO_COMPILE", "1")
    warm.write_bytes(warm.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="bytes of content"), pytest.raises(dk.CompileError, match="forbids"):
        prepare()


@pytest.fixture
def prebuilt(tmp_path: Path, entry: dict[str, Any]) -> Path:
    """A prebuilt folder with the kernel of `entry`, made by an NVRTC of long ago."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    shutil.copy(entry["file"], folder / f"{entry['entry']}-nvrtc12.0.dk")
    return folder


@pytest.mark.parametrize("nvrtc_setting", [{}, {"DEEP_KERNELS_NVRTC": "/nonexistent"}], ids=["nvrtc", "no_nvrtc"])
@pytest.mark.parametrize("no_compile", ["0", "1"])
def test_prebuilt_hits_whatever_nvrtc(
    fresh: Fresh, prebuilt: Path, tmp_path: Path, nvrtc_setting: dict[str, str], no_compile: str
) -> None:
    env = {"DEEP_KERNELS_PREBUILT_DIR": prebuilt, "DEEP_KERNELS_CACHE_DIR": tmp_path / "cache"}
    report = fresh.run(prepare_in_child, env=env | nvrtc_setting | {"DEEP_KERNELS_NO_COMPILE": no_compile})
    assert (report["origin"], report["warnings"]) == ("prebuilt", [])
    assert Path(report["file"]).parent == prebuilt
    assert not (tmp_path / "cache").exists(), "nothing is copied"


def test_prebuilt_comes_before_the_cache(prebuilt: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_PREBUILT_DIR", str(prebuilt))
    assert prepare()["origin"] == "prebuilt"
    assert prepare(num_heads=16)["origin"] == "compiled", "what is not there is compiled"
    assert len(os.listdir(prebuilt)) == 1


def test_broken_prebuilt_entry_is_passed_over(prebuilt: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_PREBUILT_DIR", str(prebuilt))
    (file,) = prebuilt.iterdir()
    before = file.read_bytes()[:-1]
    file.write_bytes(before)
    report, messages = prepare_noting_warnings()
    assert (report["origin"], len(messages)) == ("cache", 1)
    assert file.read_bytes() == before, "the folder is never written"
    shutil.copy(warm, prebuilt / f"{report['entry']}-nvrtc12.1.dk")
    report, messages = prepare_noting_warnings()
    assert (report["origin"], len(messages)) == ("prebuilt", 1), "another version of it serves"


def test_missing_prebuilt_folder_is_said_once(fresh: Fresh, warm: Path, tmp_path: Path) -> None:
    env = {"DEEP_KERNELS_PREBUILT_DIR": tmp_path / "typo", "DEEP_KERNELS_CACHE_DIR": warm.parent}
    report = fresh.run(prepare_in_child, env=env)
    assert report["origin"] == "cache"
    message = f"deep_kernels: DEEP_KERNELS_PREBUILT_DIR names {tmp_path / 'typo'}, where there is no folder"
    assert report["warnings"] == [message]


def test_without_nvrtc_the_cache_of_any_version_serves(fresh: Fresh, warm: Path) -> None:
    warm.rename(warm.with_name(f"{warm.name.split('-')[0]}-nvrtc12.4.dk"))
    env = {"DEEP_KERNELS_CACHE_DIR": warm.parent, "DEEP_KERNELS_NVRTC": "/nonexistent"}
    assert fresh.run(prepare_in_child, env=env)["origin"] == "cache"


@pytest.mark.parametrize("kind", ["missing", "text", "other", "old"])
def test_unusable_nvrtc_is_one_sentence(fresh: Fresh, tmp_path: Path, shim: dict[str, str], kind: str) -> None:
    library = tmp_path / "libnvrtc.so"
    env: dict[str, Any] = {"DEEP_KERNELS_NVRTC": library, "DEEP_KERNELS_CACHE_DIR": tmp_path / "cache"}
    reason = "cannot open shared object file"
    if kind == "text":
        library.write_text("no library")
        reason = "file too short|invalid ELF header"
    elif kind == "other":
        # Not the extension: it leads to NVRTC where torch is linked with it.
        library.symlink_to(_ctypes.__file__)
        reason = "lacks nvrtcVersion"
    elif kind == "old":
        env |= shim | {"SHIM_VERSION": "11.8"}
        reason = "is version 11.8, 12.0 or newer is needed"
    message = fresh.run(prepare_refused, env=env)
    assert "\n" not in message
    assert message.startswith(
        f"mqa_schedule for sm_89 is neither in memory nor in {tmp_path / 'cache'} and cannot be compiled; "
        f"spec: backend=sm89 num_heads=8; DEEP_KERNELS_NVRTC names '{env['DEEP_KERNELS_NVRTC']}', "
    )
    assert re.search(reason, message)
