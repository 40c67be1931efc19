"""Jobs that come to a certain point and stay there until a test lets them go on.

A step of these jobs takes a tenth of a second: whoever waits for one and then does something to the job may find
it at its end. Rows from a certain position on get no reward, so no step with them comes about, until a file is there.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.program import GROUPS

REWARDS = "{ boxed_math = 1.0, format = 0.2 }"
GATE = """
import os
import time

def gate(completion, row, go):
    while row.get("held") and not os.path.exists(go):
        time.sleep(0.02)
    return 0.0
"""


def hold(config: Path, step: int, rows: int) -> Path:
    """Change a configuration of `write_config`: its job trains `step` steps at most and stays there. Gives it back.

    Only `step` less the staleness bound are sure: a row that is held may be scored first, and then the one reward
    process of the replica scores no other.
    """
    folder = config.parent
    (folder / "gate.py").write_text(GATE)
    data = [
        {
            "prompt": f"{10 + i % 90} + {10 + i % 7} = ?",
            "answer": str(20 + i % 90 + i % 7),
            "held": i >= step * GROUPS,
        }
        for i in range(rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, data)))
    text = config.read_text()
    begin, _, rest = text.partition('name = "synthetic:addition"\n')
    options, _, end = rest.partition("\n")
    assert options.startswith("options = ")
    text = f'{begin}name = "{folder}/rows.jsonl"\n{end}'
    gated = REWARDS.replace(" }", f', "{folder}/gate.py:gate" = 1.0 }}\ndataloader_shuffle = false')
    assert REWARDS in text
    text = text.replace(REWARDS, gated, 1)
    config.write_text(text + f'\n[reward]\ntimeout = 1000.0\n\n[custom]\ngo = "{folder}/go"\n')
    return config


def go_on(config: Path) -> None:
    """Let the job of a configuration go on that is held."""
    (config.parent / "go").touch()
