"""Checks that a name in a message has no module imported but those of its mark."""

from __future__ import annotations

import subprocess
import sys

ASK = """
import sys
from torchweft.engine.codec.registry import rebuilds_plain, remotely_callable

def loaded():
    return {name for name in sys.modules if name.startswith("torchweft.")}

before = loaded()
unmarked = ("torchweft.checkpoint.owners:write", "torchweft.rpc.joining:shutdown", "os:system")
for name in ("torchweft.compat.rpc.references:when_made", *unmarked):
    assert not remotely_callable.has(name)
    assert not rebuilds_plain.has(name)
assert loaded() == before
assert "torchweft.nn.owner" not in before
assert remotely_callable.has("torchweft.nn.owner:run")
assert not remotely_callable.has("torchweft.nn.owner:Step")
assert rebuilds_plain.has("torchweft.nn.owner:Step")
assert not any(name.startswith("torchweft.compat") for name in loaded())
"""


def test_a_name_has_only_the_modules_of_its_mark_imported() -> None:
    subprocess.run([sys.executable, "-c", ASK], check=True, timeout=60)
