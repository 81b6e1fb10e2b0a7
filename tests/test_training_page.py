"""examples/TRAINING.md names a test for each of its lines; here: that these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_line_has_its_test() -> None:
    page = (HERE.parent / "examples" / "TRAINING.md").read_text().split("\n## ")[0]
    rows = [
        line
        for line in page.splitlines()
        if line.startswith("| ") and "write" not in line and "---" not in line
    ]
    rows = [row for row in rows if row.count("|") == 5]
    assert len(rows) > 12
    for row in rows:
        cell = row.split("|")[-2]
        files = re.findall(r"(test_\w+\.py)", cell)
        assert files, row
        sources = {name: (HERE / name).read_text() for name in files}
        for test in re.findall(r"::(test_\w+)", cell):
            assert any(f"def {test}(" in source for source in sources.values()), test
        for scenario in re.findall(r'"([^"]+?)(?: \.\.\.)?"', cell):
            assert f'"{scenario}' in (HERE / "distributed_worker.py").read_text(), scenario
