"""Builds the optional native twin; everything else stands in ``pyproject.toml``.

Where it cannot be built, for want of a compiler or of Python's headers, the package is installed
without it, and the twin in Python does the same.
"""

from __future__ import annotations

import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class OptionalBuild(build_ext):
    """Builds the native twin, or says in one line that it is left out."""

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension; a failure is no error."""
        try:
            super().build_extension(ext)
        except Exception:  # of the compiler, of which there are many kinds; it has said why
            compiler = getattr(self.compiler, "compiler_so", ["the C compiler"])[0]
            print(
                f"torchweft: the native twin is left out, as {compiler!r} cannot build it; the one "
                "in Python does the same, slower",
                file=sys.stderr,
            )


setup(
    cmdclass={"build_ext": OptionalBuild},
    ext_modules=[
        Extension(
            "torchweft._native",
            sources=sorted(glob("native/*.c")),
            depends=sorted(glob("native/*.h")),
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
            optional=True,
        )
    ],
)
