"""Makes the modules of the language model importable, as they are for the script beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "language_model"))
