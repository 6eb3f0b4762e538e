"""The demo: a search through a real text in which one fp8_fp4_mqa_logits call scores every position.

Each token of the text is a key: a 128-wide vector of hashed character n-grams and synonyms with a little of its
neighbours. Each term of the query is a head, its rarity the weight. Row 0 of the call is the whole query; row
1 + t has the weight of term t alone, so that the ranking knows which terms a passage holds.
"""

from __future__ import annotations

import argparse
import bisect
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import deep_kernels
from deep_kernels import formats

HEAD_DIM = 128
MAX_TERMS = 16  # the rarest are kept; the rows of the call grow with the heads, so its work is quadratic here
NGRAM_SIZES = (3, 4)
PREFIX_SIZES = (4, 5, 6, 7)  # n-grams at the marked begin of a word once more: its forms differ at the end
MAX_NGRAM_CHARS = 64  # of one word; its whole spelling counts in any case
WHOLE_WORD_WEIGHT = 1.0  # of a word's full spelling, in units of its average n-gram
SYNONYM_WEIGHT = 1.0  # of what a word shares with its synonyms, in units of all its n-grams
CONTEXT_WEIGHT = 0.35  # of each direct neighbour, in units of the token itself
SMALL_CALL = 1 << 32  # multiply-adds, about 0.3 s on one core, up to which a call on the CPU gets one thread
CHUNK = 8192  # tokens at a time: 4 MiB of float32, which stays in the cache of one core

# Two unrelated words have a cosine of about +-1 / sqrt(120). The last two dimensions of each block of 32 hold
# BIAS in the keys and -BIAS in the queries: every dot product loses 8 * BIAS^2 = 0.28, and the ReLU of the op
# then removes the noise. 0.1875 = 6 / 32 is exact in e2m1 under every block exponent that occurs.
BIAS = 0.1875
BIAS_DIMS = [block + dim for block in range(0, HEAD_DIM, 32) for dim in (30, 31)]
WORD_DIMS = [dim for dim in range(HEAD_DIM) if dim not in BIAS_DIMS]
THRESHOLD = len(BIAS_DIMS) * BIAS * BIAS
PERFECT_MATCH = 1 / math.sqrt(1 + 2 * CONTEXT_WEIGHT**2) - THRESHOLD  # of a term with its own token
SIMILAR = 0.6  # cosine from which two words count as forms of one, for the rarity
STRONG = 0.4  # fraction of a perfect match from which a token is a hit
WEAK = 0.15  # fraction of a perfect match below which it is noise
TELLING = 0.25  # rarity, in units of the rarest term, from which a term can make a hit

# Paragraphs are joined up to MIN_TOKENS, or MIN_DEDENT_TOKENS before one that is indented less; longer ones
# are cut, at line ends if possible, after MAX_TOKENS.
MIN_TOKENS, MIN_DEDENT_TOKENS, MAX_TOKENS = 40, 15, 120

# The score of a passage, each part summed over the terms by rarity: its own matches, the best match among the
# headings above it, the matches of its whole document, and the best single position for the whole query.
# Matches m saturate as m / (m + k * (length / average length) ^ exponent), the form of BM25 (Robertson,
# Zaragoza: The Probabilistic Relevance Framework, section 3.4). Tuned on queries of tests/demo_queries.py,
# of which 141 of 160 have their answer among the first three; a change of one of them, or of SYNONYM_WEIGHT, by a
# third makes that 138 to 143.
PASSAGE_K, PASSAGE_EXPONENT = 1.5, 0.3
DOCUMENT_K, DOCUMENT_EXPONENT = 6.0, 1.0
HEADING_WEIGHT = 0.8
DOCUMENT_WEIGHT = 1.5
POSITION_WEIGHT = 0.1

DEFAULT_TOP = 3
MAX_SHOWN_LINES, MAX_LINE_CHARS = 12, 110
HIT_COLOR, TITLE_COLOR, NO_COLOR = "\033[1;31m", "\033[1m", "\033[0m"

# Words of questions that say nothing about the subject, yet are rare in a text that asks nothing.
QUESTION_WORDS = """
a about am an are be been being by can could did do does doing get gets had has have how i into it its make me
mean means my of on our shall should show so some tell that the their them then there these they this those to
us use used using want was we were what when where which who whose why will would you your
"""
STOP_WORDS = frozenset(QUESTION_WORDS.split())

# Words by which programmers of different languages mean the same, a line each, without their endings: "rais" is
# raise, raised and raising. The words of one line get a direction in common, so that a question need not know
# the word that the text uses. A word belongs to one line at most.
SYNONYMS = """
argument parameter
array list
await wait
begin start
break exit leav stop stopp
build creat mak construct
call invok
catch handl
chang alter modif updat
check test verif
choos select
combin concatenat join merg
copy copie clon duplicat
declar defin definit
delet del remov
destroy free
dictionar dict mapping
error exception
evaluat calculat comput
find look search
import load
inherit deriv subclass
iterat loop
numeric number integer
omit skip
print display show
restrict limit
string str text
suspend paus resum
throw rais
"""
ENDING = "(?:s|e|es|ed|er|ers|or|ors|ing|y|ies|ion|ions|ation|ations)?"
SYNONYM = re.compile("|".join(f"({'|'.join(line.split())}){ENDING}" for line in SYNONYMS.strip().splitlines()))


class DemoError(Exception):
    """What the user has to know, in one sentence."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread.

    The arrays here are small, and on a busy machine a team of threads waits for its last member at every
    operation. On two cores that had other work the index took 2.2 s with two threads, 0.45 s with one; the call of
    the op on the default text 2 s and 0.03 s.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class Document:
    """A named stretch of the text: what the ranking ranks."""

    name: str
    begin: int  # [begin, end) in characters of Corpus.text
    end: int
    line_one: int  # where line 1 of the numbering begins


@dataclass(frozen=True)
class Corpus:
    text: str
    documents: list[Document]
    description: str
    one_hit_per_document: bool


@dataclass(frozen=True)
class Passage:
    """A few paragraphs under one chain of headings."""

    document: int
    begin: int
    end: int
    headings: tuple[int, ...]


HEADING = re.compile(
    r"^(?P<title>[^\s#].*)\n(?P<rule>([*=\-~^\"+])\3{2,})[ \t]*$|^(?P<hashes>#{1,6})[ \t]+\S.*$", re.MULTILINE
)
LINE = re.compile(r"[^\n]*\n|[^\n]+")
WORD = re.compile(r"\w+")


def load_topics() -> Corpus:
    """The language reference that CPython ships with its help system, one document per topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DemoError("this Python comes without pydoc_data.topics; name a text with --text FILE") from None
    names: dict[str, list[str]] = {}  # some topics, such as "if" and "else", share their text
    for name, body in topics.items():
        names.setdefault(body, []).append(name)
    parts: list[str] = []
    documents: list[Document] = []
    position = 0
    for body, shared in names.items():
        name = ", ".join(shared)
        part = f"{name}\n\n{body.rstrip()}\n\n"  # the name is a heading that the body need not repeat
        documents.append(Document(name, position, position + len(part), position + len(name) + 2))
        parts.append(part)
        position += len(part)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    description = f"pydoc_data.topics, the language reference of Python {version}: {len(topics)} topics"
    return Corpus("".join(parts), documents, description, one_hit_per_document=True)


def load_file(path: str) -> Corpus:
    """A text file, one document per headed section; without headings it is a single document."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise DemoError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise DemoError(f"{path or repr(path)} is a folder, not a text file") from None
    except (OSError, ValueError) as error:
        raise DemoError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not data.strip():
        raise DemoError(f"{path} is empty, there is nothing to search")
    is_utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")
    if "\0" in text:
        raise DemoError(f"{path} is not a text: it contains zero bytes")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    cuts = [match.start() for match in HEADING.finditer(text)]
    names = [_title(match) for match in HEADING.finditer(text)]
    if not cuts or text[: cuts[0]].strip():
        cuts, names = [0, *cuts], [Path(path).name, *names]
    ends = [*cuts[1:], len(text)]
    documents = [Document(name, begin, end, 0) for name, begin, end in zip(names, cuts, ends, strict=True)]
    return Corpus(text, documents, path, one_hit_per_document=len(documents) > 1)


def _title(heading: re.Match[str]) -> str:
    return (heading["title"] or heading[0].lstrip("#")).strip()


@dataclass(frozen=True)
class Words:
    """The tokens of a text."""

    begins: list[int]  # [num_tokens] in characters
    ends: list[int]
    ids: Tensor  # [num_tokens], int64: number of the word
    vocabulary: list[str]

    def __len__(self) -> int:
        return len(self.begins)

    def between(self, begin: int, end: int) -> tuple[int, int]:
        """The half-open range of the tokens that begin in characters [begin, end)."""
        return bisect.bisect_left(self.begins, begin), bisect.bisect_left(self.begins, end)


def normalize(word: str) -> str:
    return word.strip("_").lower() or word


def split_words(text: str) -> Words:
    begins: list[int] = []
    ends: list[int] = []
    ids: list[int] = []
    numbers: dict[str, int] = {}
    for match in WORD.finditer(text):
        begins.append(match.start())
        ends.append(match.end())
        ids.append(numbers.setdefault(normalize(match[0]), len(numbers)))
    return Words(begins, ends, torch.tensor(ids, dtype=torch.int64), list(numbers))


def split_passages(corpus: Corpus, words: Words) -> tuple[list[Passage], list[tuple[int, int]]]:
    """Cuts every document into passages; also the headings, as token ranges."""
    passages: list[Passage] = []
    headings: list[tuple[int, int]] = []
    chain: list[tuple[str, int]] = []  # (kind of rule, heading), from the outermost in
    kinds: list[str] = []  # kinds of rule in the order of their first use, which is their rank
    for number, document in enumerate(corpus.documents):
        if document.line_one:  # a text of its own, headed by its name
            chain, kinds = [("", len(headings))], [""]
            headings.append(words.between(document.begin, document.line_one))
        begin = document.line_one or document.begin
        found = list(HEADING.finditer(corpus.text, begin, document.end))
        cuts = [begin, *(match.start() for match in found), document.end]
        for section in range(len(cuts) - 1):
            if section > 0:
                match = found[section - 1]
                kind = match["hashes"] or match["rule"][0]
                if kind not in kinds:
                    kinds.append(kind)
                chain = [entry for entry in chain if kinds.index(entry[0]) < kinds.index(kind)]
                chain.append((kind, len(headings)))
                headings.append(words.between(match.start(), match.end()))
            spans = _join_paragraphs(corpus.text, words, cuts[section], cuts[section + 1])
            passages += [Passage(number, *span, tuple(entry[1] for entry in chain)) for span in spans]
    return passages, headings


def _join_paragraphs(text: str, words: Words, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans of characters that hold MIN_TOKENS to MAX_TOKENS where the text allows it.

    Where a paragraph is indented less than the one before, as the next entry of a list of definitions is, a
    shorter span may end too.
    """
    start, stop, count, indent = begin, begin, 0, 0
    for piece_begin, piece_end in _pieces(text, words, begin, end):
        first, last = words.between(piece_begin, piece_end)
        piece = text[piece_begin:piece_end]
        piece_indent = len(piece) - len(piece.lstrip(" "))
        enough = count >= (MIN_DEDENT_TOKENS if piece_indent < indent else MIN_TOKENS)
        if enough or (count > 0 and count + last - first > MAX_TOKENS):
            yield start, stop
            start, count = piece_begin, 0
        count += last - first
        stop, indent = piece_end, piece_indent
    if count > 0:
        yield start, stop


def _pieces(text: str, words: Words, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Paragraphs; the lines of those that are too long for one passage; and parts of lines likewise."""
    paragraph: list[tuple[int, int]] = []
    lines = [match.span() for match in LINE.finditer(text, begin, end)]
    for line in [*lines, (end, end)]:
        if text[slice(*line)].strip():
            paragraph.append(line)
            continue
        if not paragraph:
            continue
        first, last = words.between(paragraph[0][0], paragraph[-1][1])
        if last - first <= MAX_TOKENS:
            yield paragraph[0][0], paragraph[-1][1]
        else:
            for line_begin, line_end in paragraph:
                first, last = words.between(line_begin, line_end)
                cuts = [words.begins[token] for token in range(first + MAX_TOKENS, last, MAX_TOKENS)]
                yield from zip([line_begin, *cuts], [*cuts, line_end], strict=True)
        paragraph = []


# ------------------------------------------------------------------------------------------ vectors


class WordVectors:
    """Unit vectors of words in the 120 word dimensions: sums of hashed features.

    The features of a word are its n-grams, the rare ones heavier, its whole spelling, and its line of synonyms.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._num_words = len(vocabulary)
        self._spread: dict[str, int] = {}  # n-gram -> number of words with it
        for word in vocabulary:
            for gram in _ngrams(word):
                self._spread[gram] = self._spread.get(gram, 0) + 1
        self.table = self.embed(vocabulary)

    def embed(self, words: Sequence[str]) -> Tensor:
        """-> float32 [len(words), HEAD_DIM], zero in the bias dimensions."""
        rows: dict[str, int] = {}
        flat: list[int] = []
        scales: list[float] = []
        offsets: list[int] = []
        for word in words:
            offsets.append(len(flat))
            grams = _ngrams(word)
            rarities = [math.log1p(self._num_words / self._spread.get(gram, 1)) for gram in grams]
            norm = math.sqrt(sum(rarity * rarity for rarity in rarities))
            flat += [rows.setdefault(gram, len(rows)) for gram in (*grams, f"={word}")]
            scales += [*rarities, WHOLE_WORD_WEIGHT * norm / math.sqrt(len(grams))]
            if synonym := SYNONYM.fullmatch(word):
                flat.append(rows.setdefault(f"~{synonym.lastindex}", len(rows)))
                scales.append(SYNONYM_WEIGHT * norm)
        directions = torch.zeros(len(rows), HEAD_DIM)
        directions[:, WORD_DIMS] = _hashed_signs(rows)
        vectors = torch.nn.functional.embedding_bag(
            torch.tensor(flat),
            directions,
            torch.tensor(offsets),
            mode="sum",
            per_sample_weights=torch.tensor(scales),
        )
        return torch.nn.functional.normalize(vectors, dim=-1)


def _ngrams(word: str) -> list[str]:
    marked = f"<{word[:MAX_NGRAM_CHARS]}"
    grams = [marked[at : at + size] for size in NGRAM_SIZES for at in range(len(marked) - size + 1)]
    return (grams or [marked]) + [marked[:size] for size in PREFIX_SIZES if size <= len(marked)]


def _hashed_signs(grams: Iterable[str]) -> Tensor:
    """-> float32 [num_grams, len(WORD_DIMS)] of +-1: two mixed 64-bit words each, the same everywhere."""
    seeds = torch.tensor([zlib.crc32(gram.encode("utf-8", "surrogatepass")) for gram in grams])
    state = 2 * seeds.unsqueeze(1) + torch.arange(2)
    # Source: SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, figure 17).
    state = state * -0x61C8864680B583EB
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    state = state ^ (state >> 31 & (1 << 33) - 1)
    bits = (state.unsqueeze(-1) >> torch.arange(64)) & 1
    return (2.0 * bits.flatten(1) - 1.0)[:, : len(WORD_DIMS)]


def quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    quantizer = {
        "fp8": formats.quantize_fp8,
        "mxfp8": formats.quantize_mxfp8,
        "mxfp4": formats.quantize_mxfp4,
    }
    return quantizer[format](x)


def dequantize(values: Tensor, scale: Tensor, format: str) -> Tensor:
    dequantizer = {
        "fp8": formats.dequantize_fp8,
        "mxfp8": formats.dequantize_mxfp8,
        "mxfp4": formats.dequantize_mxfp4,
    }
    return dequantizer[format](values, scale, torch.float64)


def make_keys(table: Tensor, ids: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The quantized key of every token: its word, a little of both neighbours, and the bias."""
    padded = torch.cat((ids[:1], ids, ids[-1:]))
    parts: list[tuple[Tensor, Tensor]] = []
    for begin in range(0, len(ids), CHUNK):
        window = table[padded[begin : begin + CHUNK + 2]]
        keys = window[1:-1] + CONTEXT_WEIGHT * (window[:-2] + window[2:])
        keys = torch.nn.functional.normalize(keys, dim=-1)
        keys[:, BIAS_DIMS] = BIAS
        parts.append(quantize(keys, format))
    return torch.cat([part[0].view(torch.uint8) for part in parts]).view(parts[0][0].dtype), torch.cat(
        [part[1] for part in parts]
    )


# ------------------------------------------------------------------------------------------ index and search


class Index:
    """A text made ready for queries: tokens, passages, and one quantized key per token."""

    @one_thread()
    def __init__(self, corpus: Corpus, format: str, device: torch.device) -> None:
        self.corpus = corpus
        self.format = format
        self.device = device
        self.words = split_words(corpus.text)
        if len(self.words) == 0:
            raise DemoError(f"{corpus.description} holds no words, there is nothing to search")
        self.vectors = WordVectors(self.words.vocabulary)
        self.keys = make_keys(self.vectors.table.to(device), self.words.ids.to(device), format)

        self.passages, headings = split_passages(corpus, self.words)
        self.passage_spans = Spans([self.words.between(p.begin, p.end) for p in self.passages], len(self.words))
        self.document_spans = Spans([self.words.between(d.begin, d.end) for d in corpus.documents], len(self.words))
        self.heading_spans = Spans(headings, len(self.words))
        # [num_passages, depth]: the chain of headings over each passage, filled up with "none".
        depth = max(len(passage.headings) for passage in self.passages)
        none = len(headings)
        self.passage_headings = torch.tensor(
            [[*passage.headings, *[none] * (depth + 1 - len(passage.headings))] for passage in self.passages]
        )
        self.copies = self._find_copies()

    def _find_copies(self) -> dict[int, list[int]]:
        """Of passages with equal words the one in the shortest document -> the other documents with it."""
        numbers = self.words.ids.tolist()
        groups: dict[tuple[int, ...], list[int]] = {}
        for passage, (begin, end) in enumerate(self.passage_spans.ranges):
            groups.setdefault(tuple(numbers[begin:end]), []).append(passage)
        copies: dict[int, list[int]] = {}
        for group in groups.values():
            documents = [self.passages[passage].document for passage in group]
            kept = min(range(len(group)), key=lambda at: float(self.document_spans.lengths[documents[at]]))
            others = dict.fromkeys(documents)
            del others[documents[kept]]
            copies[group[kept]] = list(others)
        return copies


class Spans:
    """Disjoint ranges of tokens, ready to reduce over."""

    def __init__(self, ranges: Sequence[tuple[int, int]], num_tokens: int) -> None:
        self.ranges = ranges
        self.lengths = torch.tensor([float(end - begin) for begin, end in ranges])
        # [num_tokens]: the number of the range that holds each token, len(ranges) where none does.
        self.labels = torch.full((num_tokens,), len(ranges))
        for number, (begin, end) in enumerate(ranges):
            self.labels[begin:end] = number

    def sum(self, x: Tensor) -> Tensor:
        """[rows, num_tokens] -> [rows, len(ranges)]."""
        return self._reduce(x, "sum")[:, :-1]

    def max(self, x: Tensor) -> Tensor:
        """[rows, num_tokens], not negative -> [rows, len(ranges) + 1]; the last column is 0, for no range."""
        result = self._reduce(x, "amax")
        result[:, -1] = 0
        return result

    def _reduce(self, x: Tensor, how: str) -> Tensor:
        result = torch.zeros(x.size(0), len(self.ranges) + 1)
        return result.scatter_reduce_(1, self.labels.expand(x.size(0), -1), x, how)


@dataclass(frozen=True)
class Term:
    word: str
    rarity: float


@dataclass(frozen=True)
class Scores:
    """What the one call gave, and how it compares with the formula in float64."""

    terms: list[Term]
    logits: Tensor  # [1 + num_terms, num_tokens], float32, on the CPU
    seconds: float
    num_threads: int  # of the CPU during the call
    agreement: float  # 1 - 2 * sum(x * y) / sum(x^2 + y^2)
    largest_error: float


@dataclass(frozen=True)
class Hit:
    document: int
    passage: int
    score: float
    copies: list[int]  # other documents that hold the same passage
    best_token: int


@one_thread()
def find_terms(index: Index, query: str) -> tuple[list[Term], list[str]]:
    """The terms of a query with their rarity, the rarest first, and those that had to be left out."""
    words = list(dict.fromkeys(normalize(match[0]) for match in WORD.finditer(query)))
    if not words:
        raise DemoError("the query has no words in it" if query.strip() else "there is no query; give some words")
    words = [word for word in words if word not in STOP_WORDS] or words
    similar = index.vectors.embed(words) @ index.vectors.table.T >= SIMILAR  # [num_terms, num_words]
    num_passages = len(index.passages)
    terms = []
    for word, forms in zip(words, similar, strict=True):
        held = index.passage_spans.labels[forms[index.words.ids]].bincount(minlength=num_passages)
        count = int((held[:num_passages] > 0).sum())
        terms.append(Term(word, math.log1p((num_passages - count + 0.5) / (count + 0.5))))
    terms.sort(key=lambda term: -term.rarity)
    return terms[:MAX_TERMS], [term.word for term in terms[MAX_TERMS:]]


def score_positions(index: Index, terms: Sequence[Term]) -> Scores:
    """Scores every token of the text in one call: row 0 with all terms, row 1 + t with term t alone."""
    device, num_tokens = index.device, len(index.words)
    queries = index.vectors.embed([term.word for term in terms])
    queries[:, BIAS_DIMS] = -BIAS
    heads, scale = quantize(queries.to(device), index.format)
    rarities = torch.tensor([term.rarity for term in terms], device=device)
    if index.format == "fp8":
        rarities = rarities * scale  # a query has no scale of its own in this format
    weights = torch.cat((rarities.unsqueeze(0), rarities.diag()))
    num_rows = len(weights)
    q_values = heads.view(torch.uint8).repeat(num_rows, 1, 1).view(heads.dtype)
    q_scale = None if index.format == "fp8" else scale.repeat(num_rows, 1)
    starts = torch.zeros(num_rows, dtype=torch.int32, device=device)
    ends = torch.full_like(starts, num_tokens)

    if device.type == "cuda":  # compile or load the kernel, so that the time below is that of a call
        first_keys = (index.keys[0][:1], index.keys[1][:1])
        deep_kernels.fp8_fp4_mqa_logits((q_values, q_scale), first_keys, weights, starts, ends.clamp(max=1))
    work = num_rows * len(terms) * num_tokens * HEAD_DIM
    with one_thread() if work <= SMALL_CALL else nullcontext():
        num_threads = torch.get_num_threads()
        _synchronize(device)
        begin = time.perf_counter()
        logits = deep_kernels.fp8_fp4_mqa_logits(
            (q_values, q_scale), index.keys, weights, starts, ends, clean_logits=True
        )
        _synchronize(device)
        seconds = time.perf_counter() - begin

    unit = torch.ones_like(scale) if index.format == "fp8" else scale
    agreement, largest_error = _compare(index, dequantize(heads, unit, index.format), weights.double(), logits)
    return Scores(list(terms), logits.float().cpu(), seconds, num_threads, agreement, largest_error)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@one_thread()
def _compare(index: Index, heads: Tensor, weights: Tensor, logits: Tensor) -> tuple[float, float]:
    """The agreement with the formula in float64 on the same quantized values, and the largest error.

    Every row of the call has the same heads, so that one dot product per head and token is enough.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=logits.device)  # (x - y)^2, x^2 + y^2, max |x - y|
    for at in range(0, logits.size(1), CHUNK):
        part = slice(at, at + CHUNK)
        keys = dequantize(index.keys[0][part], index.keys[1][part], index.format)
        expected = weights @ torch.relu(heads @ keys.T)
        actual = logits[:, part].double()
        error = actual - expected
        sums[0] += error.square().sum()
        sums[1] += actual.square().sum() + expected.square().sum()
        sums[2] = torch.maximum(sums[2], error.abs().max())
    squares, total, largest = sums.tolist()
    return (squares / total if total > 0 else 0.0), largest


@one_thread()
def match_strengths(scores: Scores) -> Tensor:
    """[num_terms, num_tokens] in 0..1: how well each token matches each term; 1 is the term itself."""
    rarities = torch.tensor([term.rarity for term in scores.terms])
    strengths = (scores.logits[1:] / (rarities.unsqueeze(1) * PERFECT_MATCH)).clamp(0, 1)
    return torch.where(strengths < WEAK, 0, strengths)


def is_hit(scores: Scores, strengths: Tensor) -> Tensor:
    """[num_tokens]: whether a token matches a term that tells something."""
    rarities = torch.tensor([term.rarity for term in scores.terms])
    return (strengths[rarities >= TELLING * rarities.max()] >= STRONG).any(dim=0)


@one_thread()
def rank(index: Index, scores: Scores) -> list[Hit]:
    """The passages that match, best first; one per document where the text has several."""
    rarities = torch.tensor([term.rarity for term in scores.terms])
    shares = rarities / rarities.sum()
    strengths = match_strengths(scores)

    def saturated(spans: Spans, k: float, exponent: float) -> Tensor:
        """[num_spans] in 0..1."""
        matches = spans.sum(strengths)
        return shares @ (matches / (matches + k * (spans.lengths / spans.lengths.mean()) ** exponent))

    headings = index.heading_spans.max(strengths)[:, index.passage_headings].amax(dim=-1)
    documents = torch.tensor([passage.document for passage in index.passages])
    position = index.passage_spans.max(scores.logits[:1])[0, :-1] / (rarities.sum() * PERFECT_MATCH)
    score = (
        saturated(index.passage_spans, PASSAGE_K, PASSAGE_EXPONENT)
        + HEADING_WEIGHT * (shares @ headings)
        + DOCUMENT_WEIGHT * saturated(index.document_spans, DOCUMENT_K, DOCUMENT_EXPONENT)[documents]
        + POSITION_WEIGHT * position
    )
    has_hit = index.passage_spans.max(is_hit(scores, strengths).float().unsqueeze(0))[0, :-1] > 0

    hits: list[Hit] = []
    seen: set[int] = set()
    for passage in score.argsort(descending=True, stable=True).tolist():
        document = index.passages[passage].document
        if not has_hit[passage] or passage not in index.copies:
            continue
        if index.corpus.one_hit_per_document and document in seen:
            continue
        seen.add(document)
        begin, end = index.passage_spans.ranges[passage]
        best_token = begin + int(scores.logits[0, begin:end].argmax())
        hits.append(Hit(document, passage, float(score[passage]), index.copies[passage], best_token))
    return hits


# ------------------------------------------------------------------------------------------ output


def render_hit(index: Index, hit: Hit, is_match: Tensor, color: bool) -> str:
    """A title line and the passage, its best line marked with ">" and the matching words in color."""
    corpus, words = index.corpus, index.words
    document, passage = corpus.documents[hit.document], index.passages[hit.passage]
    text = corpus.text
    best_at = words.begins[hit.best_token]
    lines = list(_display_lines(text, passage.begin, passage.end))
    best = next(number for number, (begin, end) in enumerate(lines) if begin <= best_at < end)
    first = max(0, min(best - MAX_SHOWN_LINES // 2, len(lines) - MAX_SHOWN_LINES))
    shown = lines[first : first + MAX_SHOWN_LINES]
    indent = min(len(line) - len(line.lstrip()) for line in (text[begin:end] for begin, end in shown) if line.strip())

    line_number = text.count("\n", document.line_one, best_at) + 1
    title = f"{document.name}, line {line_number}"
    notes = [f"score {hit.score:.2f}"]
    if hit.copies:
        notes.append("also in " + ", ".join(corpus.documents[number].name for number in hit.copies))
    out = [f"{TITLE_COLOR}{title}{NO_COLOR} ({'; '.join(notes)})" if color else f"{title} ({'; '.join(notes)})"]
    for begin, end in shown:
        gutter = "  > " if begin <= best_at < end else "    "
        pieces: list[str] = []
        at = min(begin + indent, end)
        for token in range(*words.between(at, end)):
            if color and is_match[token]:
                word_end = min(words.ends[token], end)
                pieces += [
                    _printable(text[at : words.begins[token]]),
                    HIT_COLOR,
                    _printable(text[words.begins[token] : word_end]),
                    NO_COLOR,
                ]
                at = word_end
        out.append((gutter + "".join(pieces) + _printable(text[at:end])).rstrip())
    return "\n".join(out)


def _display_lines(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The lines in [begin, end) without blank ones at the end, those that are too long broken at spaces."""
    stop = begin + len(text[begin:end].rstrip())
    for match in LINE.finditer(text, begin, stop):
        at = match.start()
        while match.end() - at > MAX_LINE_CHARS and not text[at : match.end()].isspace():
            space = text.rfind(" ", at + 1, at + MAX_LINE_CHARS)
            cut = space + 1 if space > at else at + MAX_LINE_CHARS
            yield at, cut
            at = cut
        yield at, match.end()


def _printable(text: str) -> str:
    """Without the control characters by which a text could steer the terminal."""
    return "".join(char if char.isprintable() or char == "\t" else "" if char == "\n" else "?" for char in text)


def _write(lines: Sequence[str]) -> None:
    """Prints, with what the stream cannot encode replaced."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print("\n".join(lines).encode(encoding, "replace").decode(encoding))


def report(index: Index, query: str, top: int, index_seconds: float, color: bool) -> bool:
    """Answers one query on standard output; False where nothing in the text resembles it."""
    begin = time.perf_counter()
    terms, left_out = find_terms(index, query)
    scores = score_positions(index, terms)
    hits = rank(index, scores)
    is_match = is_hit(scores, match_strengths(scores))
    search_seconds = time.perf_counter() - begin

    num_tokens, num_heads = len(index.words), len(terms)
    if index.device.type == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(index.device)})"
    else:
        device = f"cpu ({scores.num_threads} thread{'s' if scores.num_threads > 1 else ''})"
    lines = [
        f"text:      {index.corpus.description}, {len(index.corpus.text):,} characters, {num_tokens:,} tokens",
        "terms:     " + ", ".join(f"{_printable(term.word)} {term.rarity:.1f}" for term in terms) + " (rarity)",
        f"device:    {device}, format {index.format}",
        f"call:      fp8_fp4_mqa_logits, {num_heads + 1} rows x {num_heads} heads x {num_tokens:,} keys "
        f"of {HEAD_DIM}: {scores.seconds * 1e3:.2f} ms",
        f"time:      index {index_seconds:.2f} s, search and check {search_seconds:.2f} s",
        f"deviation: {scores.agreement:.1e} from the float64 formula (1 - 2 sum(xy) / sum(x^2 + y^2)), "
        f"largest error {scores.largest_error:.1e}",
    ]
    if left_out:
        lines.append(f"left out:  {', '.join(map(_printable, left_out))} (only the {MAX_TERMS} rarest terms count)")
    if not hits:
        lines += ["", "Nothing in the text resembles the query."]
    for number, hit in enumerate(hits[:top], start=1):
        lines += ["", f"{number}. {render_hit(index, hit, is_match, color)}"]
    _write(lines)
    return bool(hits)


# ------------------------------------------------------------------------------------------ command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the demo, for a parser of its own or the subcommand of another."""
    parser.add_argument("query", nargs="*", help="words to look for; quotes are not needed")
    parser.add_argument("--text", metavar="FILE", help="search this file, not the Python language reference")
    parser.add_argument("--format", choices=formats.FORMATS, default="fp8", help="of queries and keys (default fp8)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if it can")
    parser.add_argument(
        "--top", metavar="K", type=int, default=DEFAULT_TOP, help=f"passages to print (default {DEFAULT_TOP})"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo: 0 with passages, 1 if nothing matches the query, 2 with a sentence on what is wrong."""
    try:
        return 0 if _search(args) else 1
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _search(args: argparse.Namespace) -> bool:
    query = " ".join(args.query)
    if not WORD.search(query):
        raise DemoError("the query has no words in it" if query.strip() else "there is no query; give some words")
    if args.top < 1:
        raise DemoError(f"--top must be at least 1, got {args.top}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch finds no GPU here; use --device cpu")
    corpus = load_topics() if args.text is None else load_file(args.text)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    use_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())

    def answer(device: str) -> bool:
        begin = time.perf_counter()
        index = Index(corpus, args.format, torch.device(device))
        _synchronize(index.device)
        return report(index, query, args.top, time.perf_counter() - begin, color)

    if not use_cuda:
        return answer("cpu")
    try:
        return answer("cuda")
    except (deep_kernels.UnsupportedError, deep_kernels.CompileError) as error:
        reason = str(error).splitlines()[0]
        if args.device == "cuda":
            raise DemoError(reason) from None
        print(f"demo: using the CPU, since the GPU cannot: {reason}", file=sys.stderr)
        return answer("cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """The demo as a command of its own."""
    parser = argparse.ArgumentParser(prog="python -m deep_kernels demo", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return int(stop.code or 0)
    return run(args)
