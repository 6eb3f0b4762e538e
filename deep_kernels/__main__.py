"""Command line: python -m deep_kernels env | list | show | dump | compile | clear | tune | demo | emulate."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import _C, _runtime, emulate, environment, inspector, tune

_COMPILE_FIELDS = """
Every further option is a field of the case, in the words of deep_kernels.supported():
--format, --num-heads, --head-dim, --weights-dtype, --logits-dtype, --clean-logits, --metadata, ...
Options take several values and may be repeated; every combination is compiled.

  python -m deep_kernels compile --op fp8_fp4_mqa_logits --arch sm_90a \\
      --num-heads 32 64 --logits-dtype float32 bfloat16 --metadata true
"""


def _env(args: argparse.Namespace) -> int:
    print("\n\n".join(environment.environment()))
    return 0


def _list(args: argparse.Namespace) -> int:
    rows = inspector.list_table()
    if len(rows) > 1:
        print(inspector.aligned(rows))
    else:
        print(f"no entries in {' or '.join(str(folder) for folder in inspector.folders().values())}")
    return 0


def _show(args: argparse.Namespace) -> int:
    print(inspector.describe_entry(inspector.find_entry(args.key)))
    return 0


def _dump(args: argparse.Namespace) -> int:
    entry = inspector.find_entry(args.key)
    texts = {}
    if args.src or not (args.ptx or args.sass):
        texts[".cu"] = entry.source
    if args.ptx:
        texts[".ptx"], notes = inspector.ptx(entry)
        for note in notes:
            _complain(note)
    if args.sass:
        texts[".sass"] = inspector.sass(entry)
    for suffix, text in texts.items():
        if args.out is None:
            print(text)
        else:
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"{entry.name}{suffix}"
            path.write_text(text, encoding="utf-8")
            print(path)
    return 0


def _compile(args: argparse.Namespace) -> int:
    fields = _case_fields(args.fields)
    cases = [
        {"op": op} | dict(zip(fields, values, strict=True))
        for op, *values in itertools.product(args.op, *fields.values())
    ]
    reports: dict[str, dict[str, Any]] = {}
    for arch in args.arch or [None]:
        prepared = _runtime.prepare(cases, arch=arch, jobs=args.jobs, progress=_progress(arch))
        reports |= {report["entry"]: report for report in prepared if report["entry"] not in reports}
    if not reports:
        raise inspector.InspectorError("nothing to compile for the CPU; name a target, for example --arch sm_90a")
    for report in reports.values():
        print(f"{report['origin']:<8}  {report['seconds']:6.2f} s  {report['entry']}")
    unsaved = [entry for entry, report in reports.items() if not report["file"]]
    if unsaved:
        raise inspector.InspectorError(f"{len(unsaved)} of {len(reports)} kernels could not be saved")
    return 0


def _case_fields(words: Sequence[str]) -> dict[str, list[str]]:
    """--num-heads 32 64 --metadata -> {"num_heads": ["32", "64"], "metadata": ["true"]}"""
    fields: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            name = option.replace("-", "_")
            fields.setdefault(name, []).extend([value] if equals else [])
        elif name:
            fields[name].append(word)
        else:
            raise inspector.InspectorError(f"compile: '{word}' follows no option")
    return {name: list(dict.fromkeys(values)) or ["true"] for name, values in fields.items()}


def _progress(arch: str | None) -> Callable[[int, int], None]:
    """Counts on one line of a terminal; says nothing elsewhere."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{arch or 'this card'}: {done} of {total}", end=end, file=sys.stderr, flush=True)

    return show


def _clear(args: argparse.Namespace) -> int:
    folder = inspector.folders()["cache"]
    files = [Path(file) for file in _C.removable_files(folder)]
    size = inspector.size_text(inspector.total_size(files))
    if args.dry_run:
        print(f"{len(files)} files, {size}, would be removed from {folder}")
        return 0
    removed = _C.clear_cache(folder)
    print(f"{removed} files, {size}, removed from {folder}")
    if removed < len(files):
        raise inspector.InspectorError(f"{len(files) - removed} files in {folder} could not be removed")
    return 0


def _parser(for_demo: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deep_kernels", description="Inspects, compiles and tries the kernels of deep_kernels."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, **options: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **options)
        command.set_defaults(run=run)
        return command

    add("env", _env, "versions, cards, folders and settings, with the reason for whatever is missing")
    add("list", _list, "compiled kernels on disk: Spec, registers, spilled bytes, size, compile time")

    command = add("show", _show, "everything about one compiled kernel")
    command.add_argument("key", metavar="KEY", help="any part of its name that no other has")

    command = add("dump", _dump, "source, PTX or machine code of one compiled kernel")
    command.add_argument("key", metavar="KEY", help="any part of its name that no other has")
    command.add_argument("--src", action="store_true", help="generated source (the default)")
    command.add_argument("--ptx", action="store_true", help="PTX, compiled anew from the stored source")
    command.add_argument("--sass", action="store_true", help="machine code, by nvdisasm or cuobjdump")
    command.add_argument("--out", metavar="FOLDER", type=Path, help="write files there instead of printing")

    command = add(
        "compile",
        _compile,
        "compile kernels ahead, for the card at hand or for a named target on a machine without one",
        epilog=_COMPILE_FIELDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--op", nargs="+", action="extend", required=True, help="name of a public op")
    command.add_argument(
        "--arch", nargs="+", action="extend", help="backend, target or both: sm89, sm_90a, sm89:sm_90a"
    )
    command.add_argument("--jobs", type=int, metavar="N", help="compilations at a time; default: one per core")

    command = add("clear", _clear, "remove the compiled kernels of the cache folder; the prebuilt folder stays")
    command.add_argument("--dry-run", action="store_true", help="only say how many")

    text = "measure choices on the card at hand and write their tables (needs a checkout)"
    command = add("tune", tune.run, text)
    command.add_argument("op", choices=tuple(tune.OPS), metavar="OP", help=f"one of {', '.join(tune.OPS)}")
    tune.add_arguments(command)

    text = "run one case on the host emulator and show how its kernel moves (needs a checkout)"
    emulate.add_arguments(add("emulate", emulate.run, text))

    if for_demo:  # its module is needed by no other command
        from . import demo

        demo.add_arguments(add("demo", demo.run, "search a text by one MQA logits call"))
    else:
        commands.add_parser("demo", help="search a text by one MQA logits call")
    return parser


def _complain(text: str) -> None:
    print(f"deep_kernels: {text}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # file names need not be text
    command = next((word for word in words if not word.startswith("-")), "")
    parser = _parser(for_demo=command == "demo")
    args, rest = parser.parse_known_args(words)
    if rest and args.command != "compile":
        parser.error(f"{args.command}: unknown argument {rest[0]}")
    args.fields = rest
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _complain(str(message).removeprefix("deep_kernels: "))
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (inspector.InspectorError, ValueError, OSError, RuntimeError) as error:
        _complain(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
