"""Makes the modules of the examples importable, as they are for the examples' scripts."""

from __future__ import annotations

import sys
from pathlib import Path

_EXAMPLES = Path(__file__).parents[3] / "examples"
# All folders have a train.py; `import train` finds the first one.
_FOLDERS = ("language_model", "meta_learning", "pipeline", "embedding")
sys.path[:0] = [str(_EXAMPLES / name) for name in _FOLDERS]
