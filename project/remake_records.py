"""Measure the records of docs/results again, each by the command that it names.

    python project/remake_records.py cpu-2-cores                        what there is, of which commit
    python project/remake_records.py cpu-2-cores peers options          measure these two again
    python project/remake_records.py nvidia-h200 all                    all that are of another commit
    python project/remake_records.py nvidia-h200 all --into nvidia-h100    the same on another device

Figures of one device can be compared when their records are from one commit.  A record that is of the
checked out commit already is left alone, so that what was interrupted goes on.  The old record stays if
its command breaks off or makes fewer rows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from bench.measuring import commit_of_checkout
from bench.table_cells import markdown
from common.command_line import OneLineParser
from common.one_by_one import run_one_by_one

ROOT = Path(__file__).resolve().parents[1]
RESULTS, BUILD = ROOT / "docs" / "results", ROOT / "build" / "records"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folders = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
    parser.add_argument("device", choices=folders, help="folder of the records")
    parser.add_argument("names", nargs="*", metavar="NAME", help="records to measure, or: all")
    parser.add_argument("--into", metavar="DEVICE", help="folder to write to (default: the same)")
    args = parser.parse_args(argv)
    args.into = args.into or args.device
    found = records_of(args.device)
    if args.names == ["all"]:
        args.names = list(found)
    if unknown := sorted({*args.names} - {*found}):
        parser.error(f"{args.device} has no record {', '.join(unknown)}; it has {', '.join(found)}")
    return args


def records_of(device: str) -> dict[str, dict[str, Any]]:
    """Return the records of a device by name; those that name no command are none."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((RESULTS / device).glob("*.json"))
    }
    return {name: record for name, record in found.items() if "command" in record}


def commit_of(record: dict[str, Any]) -> str:
    """Return the commit that a record names; empty if it names none."""
    return str(record.get("versions", {}).get("commit", ""))


def command_of(record: dict[str, Any], file: Path) -> list[str] | str:
    """Return the command that measures a record into a file, or why there is none."""
    words = shlex.split(record["command"])
    if words.count("python") != 1 or words[0] != "python":
        return "not made by one command of one process"
    kept = words[1:]
    if "--json" in kept:
        at = kept.index("--json")
        del kept[at : at + 2]
    return [sys.executable, *kept, "--json", str(file)]


def take(fresh: Path, file: Path, before: dict[str, Any]) -> str:
    """Put a fresh record in its place; return what became of it."""
    if not fresh.exists():
        return "no record"
    made = len(json.loads(fresh.read_text(encoding="utf-8")).get("rows", ()))
    wanted = len(before.get("rows", ()))
    if made < wanted:
        return f"{made} of {wanted} rows; kept the old ones, {fresh.relative_to(ROOT)} has these"
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(fresh, file)
    return "new"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    found, current = records_of(args.device), commit_of_checkout()
    made = records_of(args.into)
    if not args.names:
        lines = [
            [name, each["date"], commit_of(each), each["command"]] for name, each in found.items()
        ]
        print(markdown(["record", "date", "commit", "command"], lines))
        return 0
    lines, worst = [], 0
    for name in args.names:
        if current and commit_of(made.get(name, {})) == current:
            lines.append([name, f"is of {current} already", "–"])
            continue
        fresh = BUILD / args.into / f"{name}.json"
        fresh.parent.mkdir(parents=True, exist_ok=True)
        (line,), code = run_one_by_one({name: command_of(found[name], fresh)})
        became = take(fresh, RESULTS / args.into / f"{name}.json", found[name])
        lines.append([name, f"{line[1]}; {became}", line[2]])
        worst = worst or code
        if code == 130:
            break
    print(f"\n{markdown(['record', '', 'seconds'], lines)}")
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
