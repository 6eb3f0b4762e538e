#!/usr/bin/env python3
"""Enforces the layer table of ARCHITECTURE.md, and the habits that no formatter or linter looks after.

Prints one line per finding, `path:line: [rule] what`, and exits with 1 if there is one. Text is compared, nothing is
compiled: comments and strings are blanked first, except where a rule is about them. An exception to a rule is an entry
of ALLOWED with its reason; one that is no longer needed is a finding too.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

# (rule, path) -> why the file may.
ALLOWED: dict[tuple[str, str], str] = {}

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = "deep_kernels/include/deep_kernels"
KERNEL_FILE_LINES = 600
HOST_FILE_LINES = 300
FUNCTION_LINES = 80
SHARED_LINES = 0.4  # of the shorter of two kernel files: more, and they owe a common piece

# Standard headers have neither slash nor suffix; what is named here is slow, locale-bound or, <regex>, clashes with
# symbols of torch.
BANNED_STD = {"regex", "iostream", "ostream", "istream", "sstream", "fstream", "iomanip", "locale", "codecvt"}
# Headers of the operating system: lower case, in angle brackets.
POSIX = re.compile(r"(?:sys/)?[a-z0-9_]+\.h")
TORCH = ("ATen/", "c10/", "torch/")

# Runtime headers that ops/ may use: what a kernel is asked for and launched with, not how it is made.
RUNTIME_FOR_OPS = ("arch", "driver", "errors", "module", "settings", "source", "store", "tensor_map")


@dataclass(frozen=True)
class Layer:
    name: str
    folder: str
    includes: tuple[str, ...]  # headers, or folders with a slash at the end; "<std>" and "<posix>"
    is_deep: bool = True  # subfolders too


CONTRACT_TYPES = "deep_kernels/contract/types.h"
LAYERS = (
    Layer("contract", f"{INCLUDE}/contract", ("deep_kernels/contract/",)),
    Layer("ptx", f"{INCLUDE}/ptx", ("deep_kernels/ptx/", CONTRACT_TYPES)),
    Layer("tile", f"{INCLUDE}/tile", ("deep_kernels/tile/", "deep_kernels/ptx/", CONTRACT_TYPES)),
    Layer(
        "kernels",
        f"{INCLUDE}/kernels",
        ("deep_kernels/kernels/", "deep_kernels/tile/", "deep_kernels/ptx/", "deep_kernels/contract/"),
    ),
    Layer("runtime", "csrc/runtime", ("runtime/", CONTRACT_TYPES, "fmt/", "<posix>", "<std>")),
    Layer("cpu", "csrc/cpu", ("cpu/", "deep_kernels/contract/", "fmt/", *TORCH, "<std>")),
    Layer(
        "ops",
        "csrc/ops",
        (
            *("ops/", "cpu/", "deep_kernels/contract/", "fmt/"),
            *(f"runtime/{name}.h" for name in RUNTIME_FOR_OPS),
            *(*TORCH, "<std>"),
        ),
    ),
    Layer(
        "bindings",
        "csrc",
        (
            *("ops/", "runtime/"),
            *(f"python_{name}.h" for name in ("args", "emulator", "errors", "lock", "ops", "text")),
            *("torch_ops.h", "fmt/", "pybind11/", "Python.h", "cxxabi.h", *TORCH, "<std>"),
        ),
        is_deep=False,
    ),
)

MATH = (
    "abs|acos|asin|atan|atan2|ceil|copysign|cos|erf|exp|exp10|exp2|expm1|fabs|floor|fma|fmax|fmin|fmod|frexp|ldexp|"
    "llrint|log|log10|log1p|log2|lrint|max|min|nearbyint|pow|rint|rcbrt|round|rsqrt|saturate|sin|sqrt|tan|tanh|trunc"
)
INTEGER = r"(?:unsigned|long|int|short|char|[ui](?:8|16|32|64)|u?int(?:8|16|32|64|ptr)_t|s?size_t|ptrdiff_t)"


@dataclass(frozen=True)
class Ban:
    """Words that may not stand in the code of some layers."""

    rule: str
    layers: tuple[str, ...]
    pattern: re.Pattern[str]
    why: str


def ban(rule: str, layers: str, pattern: str, why: str) -> Ban:
    return Ban(rule, tuple(layers.split()), re.compile(pattern, re.VERBOSE), why)


DEVICE = "contract tile kernels"
HOST = "runtime ops cpu bindings"
BANS = (
    ban("inline-asm", DEVICE, r"\basm\b", "inline asm lives in ptx/"),
    ban(
        "cuda-builtin",
        DEVICE,
        rf"""
        \b__(?!builtin_bit_cast\b)\w+                                 # __shfl_sync, __ldg, __shared__, __device__, ...
        | \b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b
        | \b(?:atomic(?:[A-Z]\w*)|(?:make_)?(?:u?(?:char|short|int|long|longlong)|float|double)[1-4])\b
        | \b(?:cuda|cooperative_groups|nvcuda)\w*
        | (?<![\w:.>])(?:{MATH})f?\s*\(                               # ptx::fma( is a wrapper, fma( is not
        | (?<![\w:.>])(?:printf|assert|clock|clock64|memcpy|memset)\s*\(
        """,
        "CUDA builtins live in ptx/",
    ),
    ban(
        "pointer-cast",
        "tile kernels",
        rf"""
        \b(?:reinterpret|const)_cast\b | \bbit_cast\b | \bintptr_t\b | \buintptr_t\b
        | \(\s*(?:const\s+)?(?:{INTEGER}\s*)+\)\s*[\w&(]              # (u64)pointer
        | \(\s*(?:const\s+)?[\w:]+(?:\s+const)?\s*\*+\s*\)\s*[\w&(]   # (float*)address
        """,
        "no pointer becomes an integer, an integer a pointer, or a pointer another outside ptx/",
    ),
    ban("std-in-device-code", "contract ptx tile kernels", r"\bstd::", "device code has no standard library"),
    ban("op-in-tile", "ptx tile", r"\b\w*(?:Args|Spec)\b", "below kernels/ nothing knows an op's Args or Spec"),
    ban(
        "slow-or-clashing",
        HOST,
        r"\bstd::(?:w?regex\w*|w?cout|w?cerr|w?clog|w?[io]?stringstream|w?[io]?fstream|locale|setlocale)\b",
        "std::regex clashes with torch's symbols and streams follow the locale: use fmt and plain loops",
    ),
    ban(
        "helper-program",
        HOST,
        r"(?<![\w.>])(?:popen|system|posix_spawnp?|v?fork|exec[lv]p?e?|execvpe)\s*\(",
        "no helper program at run time",
    ),
    ban("dlopen", "ops cpu bindings", r"\bdl(?:open|m?open|sym)\b", "libraries are loaded in runtime/"),
    ban(
        "ops-below-store",
        "ops",
        r"""
        \bdriver::(?:api|check|ensure_context|RelaxedCapture)\b | \bNvrtc\b | \bcache:: | \binclude_tree\b
        | \bsettings::(?:cache_dir|prebuilt_dir|nvrtc|no_compile|line_info|package_folders)\b
        """,
        "an op asks the store for a kernel and launches it; how it is made, kept and loaded is runtime/",
    ),
    ban(
        "logic-in-bindings",
        "bindings",
        r"""
        \bBackend\b | \bdata_ptr\b | \b(?:const|mutable)_data_ptr\b | \bat::(?:empty|zeros|full|ones)\w*
        | (?:\.|->)(?:is_cpu|is_cuda|is_contiguous|scalar_type|sizes|strides?|numel|dim|requires_grad)\s*\(
        | (?:\.|->)size\s*\(\s*[^)\s]                                # of a dimension
        | \bchoose_\w+
        """,
        "bindings hold schemas and conversions; checks, defaults and dispatch are ops/",
    ),
)
# One file reads the environment; the others ask it.
GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(")
GETENV_FILE = "csrc/runtime/settings.cpp"
CUDA_HEADER = re.compile(r"(?:^|/)(?:cuda|cudnn|cublas|nvrtc|nvml|nvjitlink|hip)[\w.]*")
# Fragments of names that stand for an op. Layers below ops/ know none, not even in a string.
OP_FRAGMENTS = {"mqa", "silu", "attn", "attention", "paged", "indexer"}

# A comment that is code: a directive, or a statement that ends as only code does.
COMMENTED_CODE = re.compile(
    r"""
    ^\s*(?:
      \#\s*(?:include|define|undef|if|ifdef|ifndef|elif|else|endif|pragma)\b
      | (?:if|for|while|switch)\s*\(.*\)\s*(?:\{|.*;)?\s*$
      | (?:else|do|try)\s*\{?\s*$
      | (?:return|throw|goto|delete|break|continue|using)\b[^.]*;\s*$
      | [\w:<>,*&\s\[\]().-]*\w\s*(?:\[.*\])?\s*(?:[-+*/%|&^]|<<|>>)?=(?!=).*;\s*$   # assignment, definition
      | (?:[\w:<>*&]+\s+)*[\w:.>-]+\(.*\)\s*(?:const\s*)?(?:;|\{)\s*$                # call, declaration, function
      | (?:(?:struct|class|enum|namespace|template|union)\b.*)(?:\{|;)\s*$
      | \}\s*(?:else\b.*)?[;,)]*\s*$
    )
    """,
    re.VERBOSE,
)

TOKEN = re.compile(
    r"""(?P<line>//(?:\\\n|[^\n])*)
      | (?P<block>/\*.*?\*/)
      | (?P<raw>R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)")
      | (?P<text>"(?:\\.|[^"\\\n])*")
      | (?P<char>(?<!\w)'(?:\\.|[^'\\\n])+')
    """,
    re.VERBOSE | re.DOTALL,
)
ACCESS_LABEL = re.compile(r"\s*(?:public|private|protected)\s*:(?!:)")
DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
INCLUDE_LINE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)


def blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.what}"


@dataclass
class Function:
    name: str
    first: int  # line
    last: int

    @property
    def num_lines(self) -> int:
        return self.last - self.first + 1


class Source:
    """A C++ file: its code without comments and strings, and those apart. Positions stay as they are."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.comments: list[tuple[int, str]] = []  # position, text
        self.strings: list[tuple[int, str]] = []
        self.code = TOKEN.sub(self._blank_token, self.text)
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", self.text))]

    def _blank_token(self, match: re.Match[str]) -> str:
        is_comment = match.lastgroup in ("line", "block")
        (self.comments if is_comment else self.strings).append((match.start(), match[0]))
        return blank(match[0])

    def line(self, position: int) -> int:
        return bisect_right(self._line_starts, position)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def includes(self) -> list[tuple[int, str, bool]]:
        """Positions, names, and whether in angle brackets. A commented one has lost its hash sign in the code."""
        found = []
        for match in INCLUDE_LINE.finditer(self.text):
            if self.code[match.start() : match.start(1)].strip():
                found.append((match.start(2), match[2], match[1] == "<"))
        return found

    @cached_property
    def statements(self) -> str:
        """The code without preprocessor lines."""
        return DIRECTIVE.sub(lambda match: blank(match[0]), self.code)

    @cached_property
    def functions(self) -> list[Function]:
        """Outermost functions, by their braces: what follows a parameter list outside every function."""
        code = self.statements
        found = []
        depth_of_function = None
        head_begin = 0
        stack: list[tuple[bool, int]] = []  # opens a function, position of its head
        for match in re.finditer(r"[{};]", code):
            if match[0] == "{":
                label = ACCESS_LABEL.match(code, head_begin, match.start())
                head_begin = label.end() if label else head_begin
                head = code[head_begin : match.start()]
                opens = depth_of_function is None and is_function_head(head)
                if opens:
                    depth_of_function = len(stack)
                stack.append((opens, head_begin + len(head) - len(head.lstrip())))
            elif match[0] == "}" and stack:
                opens, begin = stack.pop()
                if opens:
                    depth_of_function = None
                    name = re.sub(r"\s+", " ", code[begin : code.index("(", begin)]).strip().split(" ")[-1]
                    found.append(Function(name.lstrip("*&"), self.line(begin), self.line(match.start())))
            head_begin = match.end()
        return found


def is_function_head(head: str) -> bool:
    head = head.strip()
    while (shorter := re.sub(r"^template\s*<[^<>]*(?:<[^<>]*>[^<>]*)*>\s*", "", head)) != head:
        head = shorter
    if re.match(r"(?:inline\s+)?(?:namespace|class|struct|union|enum|extern)\b(?!.*\)\s*$)", head, re.DOTALL):
        return False
    if re.match(r"(?:class|struct|union|enum)\b", head):
        return False
    return "(" in head and re.search(r"=\s*$|\breturn\b", head) is None


def layer_of(path: str) -> Layer | None:
    for layer in LAYERS:
        folder = path.rpartition("/")[0]
        if folder == layer.folder or (layer.is_deep and f"{folder}/".startswith(f"{layer.folder}/")):
            return layer
    return None


def may_include(layer: Layer, name: str, is_system: bool) -> bool:
    for allowed in layer.includes:
        if allowed == "<std>":
            if is_system and "/" not in name and "." not in name:
                return True
        elif allowed == "<posix>":
            if is_system and POSIX.fullmatch(name):
                return True
        elif name == allowed or (allowed.endswith("/") and name.startswith(allowed)):
            return True
    return False


def is_ours(name: str) -> bool:
    return name.startswith(("deep_kernels/", "ops/", "cpu/", "runtime/"))


def check_includes(source: Source, layer: Layer) -> Iterator[Finding]:
    contracts = []
    for position, name, is_system in source.includes:
        line = source.line(position)
        if not is_ours(name) and CUDA_HEADER.search(name):
            yield Finding(source.path, line, "cuda-header", f"includes {name}: nothing of CUDA is needed to build")
        elif name in BANNED_STD:
            yield Finding(source.path, line, "slow-or-clashing", f"includes <{name}>: use fmt and plain loops")
        elif not may_include(layer, name, is_system):
            yield Finding(source.path, line, "include", f"{layer.name}/ may not include {name}")
        if name.startswith("deep_kernels/contract/") and name != CONTRACT_TYPES:
            contracts.append((line, name))
    if layer.name == "kernels" and len(contracts) > 1:
        yield Finding(source.path, contracts[1][0], "include", "a kernel includes one op's contract, its own")


def check_words(source: Source, layer: Layer) -> Iterator[Finding]:
    for rule in BANS:
        if layer.name in rule.layers:
            for match in rule.pattern.finditer(source.statements):
                word = re.sub(r"\s+", " ", match[0]).strip()
                yield Finding(source.path, source.line(match.start()), rule.rule, f"{word}: {rule.why}")
    if source.path != GETENV_FILE:
        for match in GETENV.finditer(source.statements):
            yield Finding(source.path, source.line(match.start()), "environment", f"only {GETENV_FILE} reads it")


def contract_names(sources: list[Source]) -> set[str]:
    """Types, constants and functions that op contracts declare at namespace level, where nothing is indented."""
    declared = re.compile(
        r"^(?:enum\s+)?(?:struct|class)\s+(?:alignas\(\w+\)\s*)?(\w+)"
        r"|^(?:inline\s+)?constexpr\s+[\w:<>*& ]+?(\w+)\s*[(=]",
        re.MULTILINE,
    )
    ours: set[str] = set()
    shared: set[str] = set()
    for source in sources:
        if source.path.startswith(f"{INCLUDE}/contract/"):
            names = {one or two for one, two in declared.findall(source.statements)}
            (shared if source.path.endswith("/types.h") else ours).update(names)
    return ours - shared


def fragments(word: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", word)}


def check_op_names(source: Source, layer: Layer, names: set[str]) -> Iterator[Finding]:
    if layer.name not in ("ptx", "tile", "runtime"):
        return
    texts = [(0, source.statements), *source.strings]
    for begin, text in texts:
        for match in re.finditer(r"[A-Za-z_]\w*", text):
            if match[0] in names or fragments(match[0]) & OP_FRAGMENTS:
                line = source.line(begin + match.start())
                yield Finding(source.path, line, "op-name", f"{match[0]}: {layer.name}/ knows no op")


def check_comments(source: Source) -> Iterator[Finding]:
    for position, comment in source.comments:
        block = comment.startswith("/*")
        lines = comment[2:-2].split("\n") if block else [comment.lstrip("/")]
        for i, line in enumerate(lines):
            if COMMENTED_CODE.search(line.strip().lstrip("*")):
                what = f"commented-out code: {line.strip()}"
                yield Finding(source.path, source.line(position) + i, "commented-code", what)


def python_functions(path: Path) -> Iterator[Function]:
    """Functions of a Python file; docstrings do not count."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            last = node.end_lineno or node.lineno
            first = body[0].lineno if body else last
            yield Function(node.name, first, last)


@dataclass
class Budget:
    """How much of a budget the largest takes."""

    what: str
    limit: int
    largest: int = 0
    where: str = ""

    def check(self, rule: str, path: str, line: int, name: str, value: int) -> Iterator[Finding]:
        if value > self.largest:
            self.largest, self.where = value, name
        if value > self.limit:
            yield Finding(path, line, rule, f"{name} has {value} lines, the budget of a {self.what} is {self.limit}")

    def __str__(self) -> str:
        return f"{self.what} {self.largest} of {self.limit} ({self.where})"


def check_budgets(root: Path, sources: list[Source]) -> tuple[list[Finding], list[Budget]]:
    kernel, host = Budget("kernel file", KERNEL_FILE_LINES), Budget("host file", HOST_FILE_LINES)
    function = Budget("function", FUNCTION_LINES)
    found: list[Finding] = []
    for source in sources:
        budget = kernel if source.path.startswith(INCLUDE) else host
        found += budget.check("file-budget", source.path, 1, source.path, source.num_lines)
        for one in source.functions:
            found += function.check("function-budget", source.path, one.first, one.name, one.num_lines)
    for path in sorted((root / "deep_kernels").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for one in python_functions(path):
            found += function.check("function-budget", name, one.first, one.name, one.num_lines)
    return found, [kernel, host, function]


def check_overlap(sources: list[Source]) -> Iterator[Finding]:
    """Kernels that share too many of their lines; braces and includes do not count."""
    lines = {}
    for source in sources:
        if source.path.startswith(f"{INCLUDE}/kernels/"):
            stripped = (line.strip() for line in source.statements.split("\n"))
            lines[source.path] = Counter(line for line in stripped if len(line) > 3)
    for (one, left), (two, right) in combinations(lines.items(), 2):
        shorter = min(left.total(), right.total())
        share = (left & right).total() / shorter if shorter else 0.0
        if share > SHARED_LINES:
            what = f"shares {share:.0%} of its lines with {Path(two).name}: they owe a common piece"
            yield Finding(one, 1, "overlap", what)


def check(root: Path) -> tuple[list[Finding], list[Budget]]:
    """All findings of a checkout that ALLOWED does not excuse, and how full the budgets are."""
    paths = [
        path
        for folder in ("csrc", INCLUDE)
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".h", ".cuh", ".cpp", ".cu", ".hpp")
    ]
    sources = [Source(root, path) for path in paths]
    names = contract_names(sources)
    found: list[Finding] = []
    for source in sources:
        layer = layer_of(source.path)
        if layer is None:
            found.append(Finding(source.path, 1, "layer", "belongs to no layer of the table"))
            continue
        found += check_includes(source, layer)
        found += check_words(source, layer)
        found += check_op_names(source, layer, names)
        found += check_comments(source)
    over, budgets = check_budgets(root, sources)
    found += over
    found += check_overlap(sources)
    excused = {(finding.rule, finding.path) for finding in found} & set(ALLOWED)
    found = [finding for finding in found if (finding.rule, finding.path) not in excused]
    for rule, path in sorted(set(ALLOWED) - excused):
        found.append(Finding(path, 1, "stale-exception", f"{rule} needs no entry in ALLOWED any more"))
    return sorted(found, key=lambda finding: (finding.path, finding.line, finding.rule)), budgets


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the checkout")
    found, budgets = check(parser.parse_args().root)
    for finding in found:
        print(finding)
    print("largest: " + ", ".join(map(str, budgets)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
