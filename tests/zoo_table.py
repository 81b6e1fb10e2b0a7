"""Check every model of the zoo and write the support table.

    python tests/zoo_table.py check RESULTS.jsonl [--parts full,cached] [--jobs 1] [NAME ...]
    python tests/zoo_table.py collect tests/zoo_results.json RESULTS.jsonl ... > NEW.json
    python tests/zoo_table.py write README.md

``check`` appends one line of JSON per model and goes on where it stopped; ``collect`` joins such files, and
what was kept before, into the results that are kept here; ``write`` puts the table made of those between the
two marks in the page.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import zoo
import zoo_check

RESULTS = Path(__file__).with_name("zoo_results.json")
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
_SECONDS = 600
_NOTHING = "no causal self-attention found"
_MARKS = {
    "ok": "yes",
    "refused": "refused",
    "not captured": "no graph",
    "not in vanilla": "-",
    "WRONG": "WRONG",
    "error": "ERROR",
}


def _child(name: str, parts: tuple[str, ...], results: Any) -> None:
    zoo_check.quiet()
    results.send(zoo_check.check(name, parts))


@functools.cache
def _context() -> Any:
    """Children of a server that has imported what they need and run nothing: quick to start, and a fork of a
    process with threads, as tests are, can crash."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "transformers.modeling_utils"])
    return context


def check_apart(name: str, parts: tuple[str, ...]) -> dict[str, Any]:
    """:func:`zoo_check.check` in a process of its own: a crash is the result of this model alone."""
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(target=_child, args=(name, parts, sender))
    process.start()
    sender.close()  # or its end would not be noticed
    reason = f"no result in {_SECONDS} s"
    try:
        if receiver.poll(_SECONDS):
            return receiver.recv()
    except EOFError:
        process.join()
        reason = f"the process ended with code {process.exitcode} and no result"
    finally:
        process.kill()
        process.join()
    return {"name": name, "status": "error", "reason": reason}


def check_all(path: Path, parts: tuple[str, ...], names: Sequence[str], jobs: int) -> None:
    known = {line["name"] for line in _lines(path)} if path.exists() else set()
    with ThreadPool(jobs) as pool, path.open("a") as file:
        waiting = [name for name in names or zoo.names() if name not in known]
        for result in pool.imap_unordered(lambda name: check_apart(name, parts), waiting):
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(result["name"], statuses(result), flush=True)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def statuses(result: dict[str, Any]) -> dict[str, str]:
    """Status of every part of one model."""
    found = {key: part["status"] for key, part in result.items() if isinstance(part, dict)}
    return found or {"all": result.get("status", "error")}


def collect(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Results by model; later files add parts, or replace them.

    How many layers there are at another depth, and what positions change, is kept of models that are mixed.
    """
    joined: dict[str, dict[str, Any]] = {}
    for path in paths:
        if path.suffix == ".json":
            joined.update(json.loads(path.read_text()))
            continue
        for result in _lines(path):
            joined.setdefault(result["name"], {}).update(_kept(result))
    for result in joined.values():
        if result.get("full", {}).get("status") != "ok":
            for part in ("depth", "shift"):
                result.pop(part, None)
    return dict(sorted(joined.items()))


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    """What does not change from run to run."""
    kept = {}
    for key, value in result.items():
        if isinstance(value, dict):
            names = ("status", "reason", "vanilla", "sites", "expected sites", "scored", "left out")
            value = {
                name: _short(value[name]) for name in names if name in value and value[name] not in ([], None)
            }
            if isinstance(value.get("vanilla"), float):
                del value["vanilla"]
        if key not in ("name", "seconds"):
            kept[key] = _short(value)
    return kept


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"\S*/site-packages/", "", "\n".join(value.split("\n")[:2]))[:600]
    return [_short(x) for x in dict.fromkeys(value)] if isinstance(value, list) else value


def counts(results: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many architectures are captured by Dynamo at all, right, right with a cache, refused, and else."""
    full = Counter(result.get("full", result).get("status") for result in results.values())
    outside = (None, "not captured", "not built")
    captured = [r for r in results.values() if r.get("full", {}).get("status") not in outside]
    without = [r for r in captured if r["full"].get("reason", "").startswith(_NOTHING)]
    mixed = [r for r in captured if r["full"]["status"] == "ok"]
    of = lambda part: Counter(r.get(part, {}).get("status") for r in mixed)  # noqa: E731
    cached, eager = of("cached"), of("eager")
    eager["ok"] += sum(r.get("attention") == "eager" for r in mixed)
    return {
        "models": len(results),
        "captured": len(captured),
        "right": full["ok"],
        "without": len(without),
        "refused": full["refused"] - len(without),
        "wrong": full["WRONG"] + full["error"] + full["not defined"],
        "cached right": cached["ok"],
        "cached refused": cached["refused"],
        "cached wrong": cached["WRONG"] + cached["error"],
        "written out right": eager["ok"],
        "written out wrong": eager["WRONG"] + eager["error"],
        "depth": of("depth")["ok"],
        "shift": of("shift")["ok"],
        "no cached decoding": cached["not in vanilla"] + cached["not captured"] + cached[None],
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The support table in Markdown."""
    heads = ("model", "class", "layers mixed over", "logits", "written out", "cached", "notes")
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for name, result in results.items():
        full = result.get("full", {})
        cells = [name, result.get("class", "-"), _layers(full)]
        cells += [_mark(result, part) for part in ("full", "eager", "cached")]
        lines.append(f"| {' | '.join((*cells, _notes(result)))} |")
    return "\n".join(lines)


def _layers(full: dict[str, Any]) -> str:
    return str(full["sites"]) if "sites" in full else "-"


def _mark(result: dict[str, Any], part: str) -> str:
    if part == "eager" and result.get("attention") == "eager":
        part = "full"  # the model has no other attention than the one that is written out
    return _MARKS.get(result.get(part, {}).get("status", ""), "-")


def _notes(result: dict[str, Any]) -> str:
    notes: list[str] = []
    if "full" not in result:
        notes.append(_sentence(str(result.get("reason", ""))))
    for part in ("full", "eager", "cached"):
        found = result.get(part, {})
        if found.get("status") != "ok" and "reason" in found:
            notes.append(_sentence(found["reason"]))
    full = result.get("full", {})
    if full.get("status") == "ok" and full.get("scored") not in (None, "before rotation"):
        notes.append(f"scores: {full['scored']}")
    notes += [f"left out: {_sentence(x)}" for x in full.get("left out", ())]
    return "; ".join(dict.fromkeys(notes)).replace("|", "/")


def _sentence(text: str) -> str:
    """The first reason that is given, without where in the code it was found."""
    found = re.search(r"^(?:  - )?[^`\n]*`[^`\n]*`: (.*)$", text, re.MULTILINE)
    text = (found[1] if found else text).split("; the search ended")[0].split(". ")[0].split("\n")[0]
    text = re.sub(r"(?:\w+ )?\(\w+\) in module ('[^']*') at \S+ `[^`]*`", r"\1", text)
    return text if len(text) <= 200 else text[:197] + "..."


def summary(results: dict[str, dict[str, Any]]) -> str:
    n = counts(results)
    return (
        f"{n['models']} models: every causal language model of transformers, and variants of their "
        f"configurations. Dynamo captures {n['captured']} of them in one graph. Of these, "
        f"{n['without']} have no causal softmax attention, which is said; {n['right']} are mixed and equal "
        f"the definition; {n['refused']} are refused with a reason; {n['wrong']} are wrong. Decoding through "
        f"a cache, {n['cached right']} equal the definition; {n['cached refused']} are refused with a reason "
        "(latent caches, which hold no values of single heads); "
        f"{n['cached wrong']} are wrong; {n['no cached decoding']} do not decode through a cache without "
        f"mixing either. With attention written out instead of fused, {n['written out right']} equal the "
        f"definition and {n['written out wrong']} are wrong. Looked at as well: the number of layers at a "
        f"second depth ({n['depth']} models), and that adding a constant to all positions changes what it "
        f"changes without mixing ({n['shift']}); all as they should be."
    )


def body(results: dict[str, dict[str, Any]]) -> str:
    """What stands between the marks of the page."""
    legend = '"Written out": with eager instead of fused attention; "-": not run.'
    rows = f"<details><summary>All of them</summary>\n\n{legend}\n\n{table(results)}\n\n</details>"
    return f"{summary(results)}\n\n{rows}"


def write(page: Path) -> None:
    text = page.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{body(json.loads(RESULTS.read_text()))}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check")
    check.add_argument("results", type=Path)
    check.add_argument("names", nargs="*")
    check.add_argument("--parts", default="")
    check.add_argument("--jobs", type=int, default=1)
    commands.add_parser("collect").add_argument("results", type=Path, nargs="+")
    commands.add_parser("write").add_argument("page", type=Path)
    given = parser.parse_args()
    if given.command == "check":
        parts = tuple(part for part in given.parts.split(",") if part)
        check_all(given.results, parts, given.names, given.jobs)
    elif given.command == "collect":
        print(json.dumps(collect(given.results), indent=1))
    else:
        write(given.page)


if __name__ == "__main__":
    main()
