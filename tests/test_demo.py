"""The demo: its ranking, its one call of the op, inputs of every kind, and what it says when it cannot."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path

import demo_queries
import pytest
import torch
from torch import Tensor

import deep_kernels
from deep_kernels import demo, formats

ROOT = Path(__file__).resolve().parent.parent
HELD_TO_THREE = demo_queries.BEFORE_TUNING + demo_queries.AFTER_TUNING
UNSEEN = (demo_queries.AFTER_TUNING, demo_queries.AFTER_REPAIR, demo_queries.AFTER_SYNONYMS)

NOTES = """\
Garden notes
============

Apples want sun. The pear tree by the wall is older and was grafted twice.

Water
-----

In summer the hose runs for ten minutes every evening; the tank holds rain for a week.

Pests
-----

Aphids sit under the leaves. A ladybird eats fifty of them a day, and slugs hate copper tape.
"""


@functools.cache
def topic_index(format: str = "fp8") -> demo.Index:
    return demo.Index(demo.load_topics(), format, torch.device("cpu"))


def search(index: demo.Index, query: str) -> tuple[list[str], demo.Scores]:
    """The names of the documents found, best first, and the scores."""
    scores = demo.score_positions(index, demo.find_terms(index, query)[0])
    return [index.corpus.documents[hit.document].name for hit in demo.rank(index, scores)], scores


def first_three(index: demo.Index, query: str) -> list[str]:
    """Topics with one text share an entry, "else, if"."""
    return [topic for name in search(index, query)[0][:3] for topic in name.split(", ")]


def write(folder: Path, content: str | bytes, name: str = "notes.txt") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# ------------------------------------------------------------------------------------------ ranking


def test_the_questions_are_what_they_claim() -> None:
    seen = demo_queries.BEFORE_TUNING + demo_queries.WHILE_TUNING + demo_queries.PLAIN_WORDS
    questions = sum(UNSEEN, seen)
    assert len(HELD_TO_THREE) >= 20
    assert [len(asked) for asked in UNSEEN] == [10] * 3
    assert len({question for question, _ in questions}) == len(questions)
    topics = {topic for document in demo.load_topics().documents for topic in document.name.split(", ")}
    assert {topic for _, topic in questions} <= topics


@pytest.mark.parametrize(("question", "topic"), HELD_TO_THREE)
def test_answer_is_among_the_first_three_topics(question: str, topic: str) -> None:
    assert topic in first_three(topic_index(), question)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_mx_formats_rank_as_well(format: str) -> None:
    index = topic_index(format)
    missed = [question for question, topic in HELD_TO_THREE if topic not in first_three(index, question)]
    assert missed == []


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        (demo_queries.WHILE_TUNING, 80),
        (demo_queries.AFTER_REPAIR, 8),
        (demo_queries.PLAIN_WORDS, 25),
        (demo_queries.AFTER_SYNONYMS, 9),  # each Python's topics differ a little
    ],
)
def test_most_other_questions_hit(asked: tuple[tuple[str, str], ...], least: int) -> None:
    hits = sum(topic in first_three(topic_index(), question) for question, topic in asked)
    assert hits >= least


def test_copies_are_shown_once_under_the_most_specific_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["finally clause cleanup handler", "--device", "cpu", "--top", "5"]) == 0
    titles = re.findall(r"^\d\. (\S+), line \d+ \((.*)\)$", capsys.readouterr().out, re.MULTILINE)
    assert titles[0][0] == "try" and "also in compound" in titles[0][1]


def test_forms_of_a_word_match() -> None:
    vectors = topic_index().vectors
    for word, form in (("module", "modules"), ("slug", "slugs"), ("assign", "assignment")):
        assert float(vectors.embed([word])[0] @ vectors.embed([form])[0]) > 0.6
    for word, other in (("module", "string"), ("yield", "lambda"), ("assign", "table")):
        assert abs(float(vectors.embed([word])[0] @ vectors.embed([other])[0])) < 0.4


def test_synonyms_match_in_every_form_and_less_than_the_word_itself() -> None:
    vectors = topic_index().vectors
    for word, synonym in (("catch", "handler"), ("throw", "raised"), ("delete", "removing"), ("text", "strings")):
        assert 0.25 < float(vectors.embed([word])[0] @ vectors.embed([synonym])[0]) < 0.75
    for word in ("important", "strip", "delimiter", "loopback"):  # they only begin like one
        assert demo.SYNONYM.fullmatch(word) is None


def test_every_synonym_belongs_to_one_line() -> None:
    lines = [line.split() for line in demo.SYNONYMS.strip().splitlines()]
    words = [word for line in lines for word in line]
    assert len(set(words)) == len(words)
    for number, line in enumerate(lines, start=1):
        for word in line:
            found = demo.SYNONYM.fullmatch(word)
            assert found is not None and found.lastindex == number


def test_rare_terms_weigh_more() -> None:
    terms, left_out = demo.find_terms(topic_index(), "the anonymous function in a lambda")
    assert [term.word for term in terms] == ["anonymous", "lambda", "function", "in"]
    assert left_out == []
    assert [term.rarity for term in terms] == sorted((term.rarity for term in terms), reverse=True)
    assert demo.find_terms(topic_index(), "what is that")[0] != []  # stop words alone are still a query


# ------------------------------------------------------------------------------------------ the one call


def record_calls(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> list[tuple[object, ...]]:
    """Records the arguments of the op, and multiplies what it returns."""
    calls: list[tuple[object, ...]] = []
    op = deep_kernels.fp8_fp4_mqa_logits

    def recorded(*args: object, **kwargs: object) -> Tensor:
        calls.append(args)
        return op(*args, **kwargs) * factor

    monkeypatch.setattr(deep_kernels, "fp8_fp4_mqa_logits", recorded)
    return calls


@pytest.mark.parametrize("format", formats.FORMATS)
def test_one_call_scores_every_position(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = topic_index(format)
    calls = record_calls(monkeypatch)
    _, scores = search(index, "raise another exception")
    assert len(calls) == 1
    (q_values, q_scale), (kv_values, kv_scale), weights, starts, ends = calls[0]
    width = 64 if format == "mxfp4" else 128
    assert q_values.shape == (4, 3, width) and kv_values.shape == (len(index.words), width)
    assert (q_scale is None) == (format == "fp8")
    assert kv_scale.shape == (len(index.words),)
    assert starts.tolist() == [0] * 4 and ends.tolist() == [len(index.words)] * 4
    # Row 0 weighs all terms by rarity, row 1 + t term t alone.
    assert torch.equal(weights[0], weights[1:].diagonal())
    assert torch.equal(weights[1:], weights[1:].diagonal().diag())
    assert torch.equal(weights[0].argsort(), torch.tensor([2, 1, 0]))
    assert scores.logits.shape == (4, len(index.words))


@pytest.mark.parametrize("format", formats.FORMATS)
def test_deviation_is_that_of_the_call(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = topic_index(format)
    terms, _ = demo.find_terms(index, "operator precedence")
    scores = demo.score_positions(index, terms)
    assert scores.agreement <= 5e-6
    record_calls(monkeypatch, factor=1.1)
    off = demo.score_positions(index, terms)
    assert off.agreement == pytest.approx(1 - 2 * 1.1 / (1 + 1.1**2), rel=1e-3)
    assert off.largest_error == pytest.approx(0.1 * float(scores.logits.max()), rel=1e-3)


def test_a_term_matches_its_own_tokens_best() -> None:
    index = topic_index()
    _, scores = search(index, "lambda")
    strengths = demo.match_strengths(scores)[0]
    own = index.words.ids == index.words.vocabulary.index("lambda")
    assert float(strengths[own].min()) > 0.7
    assert float((strengths > 0).float().mean()) < 0.01  # the bias removes the noise


def test_at_most_sixteen_heads(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in topic_index().words.vocabulary if word not in demo.STOP_WORDS][:40]
    terms, left_out = demo.find_terms(topic_index(), " ".join(words))
    assert len(terms) == demo.MAX_TERMS and len(left_out) == 40 - demo.MAX_TERMS
    assert demo.main([*words, "--device", "cpu"]) == 0
    assert "only the 16 rarest terms count" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ vectors and text


def test_hash_is_the_same_on_every_machine() -> None:
    mask = (1 << 64) - 1

    def signs(gram: str) -> list[float]:
        bits: list[float] = []
        for lane in range(2):
            state = (2 * zlib.crc32(gram.encode()) + lane) * 0x9E3779B97F4A7C15 & mask
            state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
            state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
            state ^= state >> 31
            bits += [1.0 if state >> bit & 1 else -1.0 for bit in range(64)]
        return bits[: len(demo.WORD_DIMS)]

    grams = ["<lo", "loop", "=loop", "ünï", "字"]
    assert demo._hashed_signs(grams).tolist() == [signs(gram) for gram in grams]


def test_passages_cover_every_token_once() -> None:
    index = topic_index()
    names = sum(end - begin for begin, end in _name_ranges(index))
    covered = sum(end - begin for begin, end in index.passage_spans.ranges)
    assert covered + names == len(index.words)
    assert all(a[1] <= b[0] for a, b in zip(index.passage_spans.ranges, index.passage_spans.ranges[1:], strict=False))
    assert max(end - begin for begin, end in index.passage_spans.ranges) <= demo.MAX_TOKENS + demo.MIN_TOKENS


def _name_ranges(index: demo.Index) -> list[tuple[int, int]]:
    return [index.words.between(document.begin, document.line_one) for document in index.corpus.documents]


def test_a_text_with_headings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, NOTES)
    index = demo.Index(demo.load_file(path), "fp8", torch.device("cpu"))
    assert [document.name for document in index.corpus.documents] == ["Garden notes", "Water", "Pests"]
    assert demo.main(["slug", "copper", "--text", path, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^1\. Pests, line 14 ", out, re.MULTILINE)
    assert "  > Aphids sit under the leaves. A ladybird eats fifty of them a day, and slugs hate copper tape." in out
    assert path in out


def test_a_markdown_text(tmp_path: Path) -> None:
    text = "before\n\n# Fruit\n\napples\n\n## Citrus\n\nlemons and limes\n\n# Roots\n\nbeet\n"
    index = demo.Index(demo.load_file(write(tmp_path, text)), "fp8", torch.device("cpu"))
    assert [document.name for document in index.corpus.documents] == ["notes.txt", "Fruit", "Citrus", "Roots"]
    assert search(index, "lemon")[0][0] == "Citrus"
    # A passage under a heading is also found by the headings above it.
    citrus = next(passage for passage in index.passages if index.corpus.documents[passage.document].name == "Citrus")
    assert len(citrus.headings) == 2


def test_a_text_without_headings_shows_several_passages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filler = " ".join(f"filler{number}" for number in range(60))
    text = "\n\n".join([filler, "the otter swims. " + filler, filler, "an otter sleeps. " + filler])
    assert demo.main(["otter", "--text", write(tmp_path, text), "--device", "cpu"]) == 0
    titles = re.findall(r"^\d\. notes.txt, line (\d+) ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(titles) == ["3", "7"]


def test_a_text_that_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"word{number}" for number in range(3000)]
    words[2000] = "needle"
    assert demo.main(["needle", "--text", write(tmp_path, " ".join(words)), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    marked = [line for line in out.splitlines() if line.startswith("  > ")]
    assert len(marked) == 1 and "needle" in marked[0]
    assert all(len(line) <= demo.MAX_LINE_CHARS + 5 for line in out.splitlines() if line.startswith("    "))


@pytest.mark.parametrize("top", [1, 2, 3, 50])
def test_top(top: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "leaves",
        "sun",
        "rain",
        "--text",
        write(tmp_path, NOTES),
        "--device",
        "cpu",
        "--top",
        str(top),
    ]
    assert demo.main(arguments) == 0
    assert len(re.findall(r"^\d+\. ", capsys.readouterr().out, re.MULTILINE)) == min(top, 3)


# ------------------------------------------------------------------------------------------ odd texts


@pytest.mark.parametrize(
    "content",
    [
        NOTES.encode("utf-8-sig"),
        NOTES.encode("utf-16"),
        NOTES.replace("\n", "\r\n").encode(),
        NOTES.replace("\n", "\r").encode(),
        NOTES.replace("older", "älter").encode("latin-1"),
        NOTES.encode() + b"\xff\xc3\x28\xa0\xa1",
        NOTES.encode() + " Тля сидит под листьями. 蚜虫 🐞\n".encode(),
        NOTES.rstrip().encode(),
    ],
    ids=["utf-8 bom", "utf-16", "crlf", "cr", "latin-1", "broken utf-8", "other scripts", "no last newline"],
)
@pytest.mark.parametrize("format", formats.FORMATS)
def test_encodings(content: bytes, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, content)
    assert demo.main(["aphids", "ladybird", "--text", path, "--format", format, "--device", "cpu"]) == 0
    assert "\n1. Pests, line 14 " in capsys.readouterr().out


def test_one_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "otter")
    assert demo.main(["otter", "--text", path, "--device", "cpu"]) == 0
    assert "1. notes.txt, line 1 " in capsys.readouterr().out
    assert demo.main(["stone", "--text", path, "--device", "cpu"]) == 1
    assert "Nothing in the text resembles the query." in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["x" * 1_000_000, "a " + " " * 1_000_000 + "\n" + "\n" * 100_000 + "x", "=\n" * 50_000 + "x"]
)
def test_texts_that_could_take_long(text: str, tmp_path: Path) -> None:
    begin = time.thread_time()
    assert demo.main(["x", "--text", write(tmp_path, text), "--device", "cpu"]) in (0, 1)
    assert time.thread_time() - begin < 10


def test_a_text_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "otter \x1b[2J\x1b]0;title\x07 \x9b31m pond\n")
    assert demo.main(["otter", "--text", path, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "otter" in out and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)


def test_words_that_match_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["zzqqkxv", "--device", "cpu"]) == 1
    assert "Nothing in the text resembles the query." in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ refusals


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Requires exit code 2, one sentence on standard error and nothing else; returns the sentence."""
    assert demo.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("demo: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("demo: ").strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is no query; give some words"),
        ([""], "there is no query; give some words"),
        ([" ", "\t"], "there is no query; give some words"),
        (["?!", "..."], "the query has no words in it"),
        (["otter", "--top", "0"], "--top must be at least 1, got 0"),
        (["otter", "--top", "-3"], "--top must be at least 1, got -3"),
        (["otter", "--text", "no/such/file.txt"], "there is no file no/such/file.txt"),
        (["otter", "--text", ""], "'' is a folder, not a text file"),
        (["otter", "--text", "a\0b"], "cannot be read: embedded null byte"),
    ],
)
def test_refused_arguments(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refusal(arguments, capsys)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty, there is nothing to search"),
        (b" \n\t\n", "is empty, there is nothing to search"),
        ("... --- !!!\n«»\n".encode(), "holds no words, there is nothing to search"),
        (b"\x7fELF\x02\x01\x00\x00\x00words", "is not a text: it contains zero bytes"),
    ],
)
def test_refused_files(content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, content)
    assert refusal(["otter", "--text", path], capsys) == f"{path} {sentence}"


def test_refused_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(["otter", "--text", str(tmp_path)], capsys) == f"{tmp_path} is a folder, not a text file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_refused_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, NOTES)
    os.chmod(path, 0)
    assert refusal(["otter", "--text", path], capsys) == f"{path} cannot be read: Permission denied"


@pytest.mark.parametrize(
    "arguments", [["x", "--format", "fp5"], ["x", "--device", "tpu"], ["x", "--top", "y"], ["--no"]]
)
def test_unknown_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(arguments) == 2
    assert "error: " in capsys.readouterr().err


def test_no_topics_in_this_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "name a text with --text FILE" in refusal(["otter"], capsys)


# ------------------------------------------------------------------------------------------ devices


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(["otter", "--device", "cuda"], capsys) == (
        "--device cuda: torch finds no GPU here; use --device cpu"
    )


@pytest.mark.parametrize("error", ["UnsupportedError", "CompileError"])
def test_a_gpu_that_cannot(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failure(getattr(deep_kernels, error)):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            return "fp8_fp4_mqa_logits: no kernel for sm_75\nand a long log"

    real_index = demo.Index

    def index(corpus: demo.Corpus, format: str, device: torch.device) -> demo.Index:
        if device.type == "cuda":
            raise Failure
        return real_index(corpus, format, device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(demo, "Index", index)
    path = write(tmp_path, NOTES)
    sentence = "fp8_fp4_mqa_logits: no kernel for sm_75"
    assert refusal(["slug", "--text", path, "--device", "cuda"], capsys) == sentence
    assert demo.main(["slug", "--text", path]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"demo: using the CPU, since the GPU cannot: {sentence}\n"
    assert "device:    cpu" in captured.out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("format", formats.FORMATS)
def test_cuda_finds_the_same(format: str) -> None:
    index = demo.Index(demo.load_topics(), format, torch.device("cuda"))
    try:
        missed = [question for question, topic in HELD_TO_THREE if topic not in first_three(index, question)]
    except deep_kernels.UnsupportedError as error:
        pytest.skip(str(error))
    assert missed == []


# ------------------------------------------------------------------------------------------ output


@pytest.mark.parametrize("format", formats.FORMATS)
def test_report(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["operator", "precedence", "--format", format, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    out = captured.out
    assert f"format {format}" in out and "device:    cpu (" in out and "79 topics" in out
    assert re.search(r"call: +fp8_fp4_mqa_logits, 3 rows x 2 heads x [\d,]+ keys of 128: [\d.]+ ms", out)
    deviation = re.search(r"deviation: (\S+) from the float64 formula", out)
    assert deviation is not None and float(deviation[1]) <= 5e-6
    assert re.search(r"^1\. operator-summary, line \d+ \(score \d\.\d\d", out, re.MULTILINE)
    assert len(re.findall(r"^  > ", out, re.MULTILINE)) == 3
    assert "\x1b" not in out


def test_color_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def output(terminal: bool) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        assert demo.main(["lambda", "expressions", "--device", "cpu"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return "\n".join(line for line in lines if not line.startswith(("call:", "time:")))

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    plain, colored = output(False), output(True)
    assert "\x1b" not in plain
    assert f"{demo.HIT_COLOR}lambda{demo.NO_COLOR}" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert output(True) == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert output(True) == plain


def test_output_in_a_narrow_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def accept(text: str) -> int:
        written.append(text.encode("ascii").decode())
        return len(text)

    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(encoding="ascii", write=accept, flush=lambda: None))
    demo._write(["naïve “quotes”"])
    assert "".join(written) == "na?ve ?quotes?\n"


def test_threads_are_left_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), demo.one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
    assert demo.main(["lambda", "--device", "cpu"]) == 0
    assert torch.get_num_threads() == before


def test_the_index_is_fast() -> None:
    # Time of this thread alone, so that other work on the machine does not count; measured: 0.4 s.
    seconds = []
    for _ in range(3):
        begin = time.thread_time()
        demo.Index(demo.load_topics(), "fp8", torch.device("cpu"))
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 2


def test_as_a_subcommand() -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser.add_subparsers(dest="command").add_parser("demo"))
    args = parser.parse_args(["demo", "raise", "an", "exception"])
    assert (args.query, args.text, args.format, args.device, args.top) == (
        ["raise", "an", "exception"],
        None,
        "fp8",
        "auto",
        3,
    )


@pytest.mark.skipif(importlib.util.find_spec("deep_kernels.__main__") is None, reason="no command line here")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["raise an exception", "--device", "cpu"], 0, "1. raise, line "),
        (["x", "--text", "no/such/file"], 2, "no file"),
    ],
)
def test_command(arguments: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-m", "deep_kernels", "demo", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, encoding="utf-8")
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
