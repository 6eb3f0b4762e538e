"""What the emulator's events say: a table of waits per role, and a picture of all warps as one HTML file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_COLORS = ("#4e79a7", "#e15759", "#f28e2b", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#86bcb6")
_ROW = 14  # pixels


@dataclass(frozen=True)
class Span:
    """Something with a beginning and an end, in cycles of the emulator's model."""

    what: str
    phase: int
    begin: int
    end: int
    at: str

    @property
    def thing(self) -> str:
        """What is waited for without its address: "smem.kv_filled[1]"."""
        return self.what.rsplit(" at smem+", 1)[0]

    @property
    def family(self) -> str:
        """The same for all slots of a ring: "smem.kv_filled"."""
        return re.sub(r"\[.*", "", self.thing)


@dataclass
class Warp:
    """One warp's events in order of time."""

    index: int
    role: str = ""
    waits: list[Span] = field(default_factory=list)
    marks: list[Span] = field(default_factory=list)
    end: int = 0


@dataclass
class Block:
    """One block of threads."""

    index: int
    warps: dict[int, Warp] = field(default_factory=dict)
    tensor: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The cycle at which the last warp is done."""
        return max([1, *(warp.end for warp in self.warps.values())])

    def roles(self) -> Iterator[tuple[str, list[Warp]]]:
        """Warps by role, in order of their first warp."""
        names = list(dict.fromkeys(warp.role for _, warp in sorted(self.warps.items())))
        for name in names:
            yield name, [warp for _, warp in sorted(self.warps.items()) if warp.role == name]


def read_events(path: Path) -> list[Block]:
    """Blocks of a launch out of the emulator's trace file."""
    blocks: dict[int, Block] = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "block":
            blocks[event["block"]] = Block(event["block"])
            continue
        block = blocks[event["block"]]
        span = Span(event["what"], event["phase"], event["begin"], event["end"], event["at"])
        if event["kind"] in ("tensor", "copy"):
            (block.tensor if event["kind"] == "tensor" else block.copies).append(span)
            continue
        warp = block.warps.setdefault(event["warp"], Warp(event["warp"]))
        warp.end = max(warp.end, span.end)
        if event["kind"] == "role":
            warp.role = span.what
        elif event["kind"] == "wait":
            warp.waits.append(span)
        elif event["kind"] == "mark":
            warp.marks.append(span)
    return list(blocks.values())


def _range(warps: list[Warp]) -> str:
    first, last = warps[0].index, warps[-1].index
    return f"warp {first}" if first == last else f"warps {first}-{last}"


def describe(block: Block, *, all_warps: bool = False) -> str:
    """Per role what it waited for, step by step, and how much of its time that took."""
    lines = [f"block {block.index}: {block.end} cycles of the emulator's model, not of a card"]
    busy = sum(span.end - span.begin for span in block.tensor)
    if busy:
        lines.append(f"  tensor cores busy {busy / block.end:.0%} of it, {len(block.copies)} bulk copies")
    for role, warps in block.roles():
        shown = warps if all_warps else warps[:1]
        for warp in shown:
            title = f"{role or 'all'} ({_range(warps)}" + ("" if all_warps or len(warps) == 1 else ", the first shown")
            lines += ["", f"{title})" if not all_warps else f"{role or 'all'} (warp {warp.index})"]
            lines.append("     cycle    waited  for")
            events = [(span.begin, 0, span) for span in warp.waits] + [(span.begin, 1, span) for span in warp.marks]
            for begin, kind, span in sorted(events, key=lambda event: event[:2]):
                phase = f" phase {span.phase}" if span.phase >= 0 else ""
                waited = f"{span.end - span.begin:10}" if kind == 0 else " " * 10
                lines.append(f"{begin:10}{waited}  {span.thing}{phase}  [{span.at}]")
            totals: dict[str, int] = {}
            for span in warp.waits:
                totals[span.family] = totals.get(span.family, 0) + span.end - span.begin
            parts = [f"{name} {total / max(warp.end, 1):.0%}" for name, total in totals.items()]
            lines.append(f"{'':10}in all: " + (", ".join(parts) if parts else "no waits") + f" of {warp.end} cycles")
    return "\n".join(lines)


def _rect(span: Span, row: int, color: str, prefix: str) -> str:
    phase = f", phase {span.phase}" if span.phase >= 0 else ""
    title = f"{prefix}{span.what}{phase}: cycles {span.begin} to {span.end}, {span.at}"
    return (
        f'<rect x="{span.begin}" y="{row * _ROW + 1}" width="{max(span.end - span.begin, 1)}" height="{_ROW - 2}" '
        f'fill="{color}"><title>{html.escape(title)}</title></rect>'
    )


def _block_html(block: Block, colors: dict[str, str]) -> str:
    rows: list[tuple[str, str]] = []  # label, shapes
    rows.append(("tensor cores", "".join(_rect(span, 0, "#59a14f", "") for span in block.tensor)))
    rows.append(("copies", "".join(_rect(span, 1, "#bab0ac", "") for span in block.copies)))
    for _, warps in block.roles():
        for warp in warps:
            row = len(rows)
            shapes = [
                f'<rect x="0" y="{row * _ROW + 1}" width="{warp.end}" height="{_ROW - 2}" fill="#d4e8d0">'
                f"<title>warp {warp.index} {html.escape(warp.role)}: works</title></rect>"
            ]
            shapes += [
                _rect(span, row, colors[span.family], "waits for ") for span in warp.waits if span.end > span.begin
            ]
            shapes += [
                f'<rect x="{span.begin}" y="{row * _ROW + 1}" width="1" height="{_ROW - 2}" fill="#222">'
                f"<title>{html.escape(span.what)}, cycle {span.begin}, {span.at}</title></rect>"
                for span in warp.marks
            ]
            rows.append((f"{warp.index:2} {warp.role}", "".join(shapes)))
    labels = "".join(f"<div>{html.escape(label)}</div>" for label, _ in rows)
    shapes = "".join(shape for _, shape in rows)
    return (
        f"<details {'open' if block.index == 0 else ''}><summary>block {block.index}: {block.end} cycles</summary>"
        f'<div class="block"><div class="labels">{labels}</div><div class="scroll">'
        f'<svg viewBox="0 0 {block.end} {len(rows) * _ROW}" height="{len(rows) * _ROW}" '
        f'preserveAspectRatio="none">{shapes}</svg></div></div></details>'
    )


_PAGE = """<!doctype html>
<meta charset="utf-8"><title>TITLE</title>
<style>
body { font: 13px/1.4 system-ui, sans-serif; margin: 16px; color: #222; background: #fff; }
.block { display: flex; }
.labels { font: 10px/ROWpx monospace; white-space: pre; padding-right: 8px; flex: none; }
.scroll { overflow-x: auto; flex: 1; background: #f4f4f4; }
svg { display: block; width: 100%; }
.legend span { display: inline-block; margin-right: 14px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; }
summary { margin: 10px 0 4px; cursor: pointer; }
</style>
<h1 style="font-size: 16px">TITLE</h1>
<p>Time runs to the right, in cycles of the emulator's simple model: it shows who waits for whom, not how fast a card
is. Point at a bar for what it is and where in the text it stands. Black ticks are arrivals.</p>
<p class="legend">LEGEND</p>
<p>zoom <input type="range" min="1" max="40" value="1"
  oninput="for (const s of document.querySelectorAll('svg')) s.style.width = this.value * 100 + '%'"></p>
BLOCKS
"""


def page(title: str, blocks: list[Block]) -> str:
    """All blocks as one HTML page that needs nothing else."""
    families = dict.fromkeys(span.family for block in blocks for warp in block.warps.values() for span in warp.waits)
    colors = {family: _COLORS[i % len(_COLORS)] for i, family in enumerate(families)}
    entries = [("works", "#d4e8d0"), ("tensor cores busy", "#59a14f"), ("copy under way", "#bab0ac")]
    entries += [(f"waits for {family}", color) for family, color in colors.items()]
    legend = "".join(f'<span><i style="background: {color}"></i>{html.escape(name)}</span>' for name, color in entries)
    content = _PAGE.replace("ROW", str(_ROW)).replace("TITLE", html.escape(title)).replace("LEGEND", legend)
    return content.replace("BLOCKS", "\n".join(_block_html(block, colors) for block in blocks))
