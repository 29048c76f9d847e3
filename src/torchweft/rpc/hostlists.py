"""Expands SLURM's compact lists of hosts, as ``n[01-03,7]-gpu,login`` names five hosts."""

from __future__ import annotations

import itertools
import re

from torchweft.errors import ConfigurationError

MOST_HOSTS = 1 << 16
"""Hosts of a list beyond which it is refused."""

_HOST = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> list[str]:
    """Returns the hosts of a list, in its order; several brackets in a name multiply.

    Raises:
        ConfigurationError: The text is no such list, or names too many hosts.
    """
    patterns = _HOST.findall(text)
    if not patterns or ",".join(patterns) != text:
        raise _malformed(text)
    hosts: list[str] = []
    for pattern in patterns:
        literals, ranges = _BRACKET.split(pattern)[::2], _BRACKET.findall(pattern)
        choices = [_numbers(each, text) for each in ranges]
        for chosen in itertools.product(*choices):
            if len(hosts) == MOST_HOSTS:
                raise ConfigurationError(f"the list of hosts {text!r} names over {MOST_HOSTS}")
            hosts.append("".join(map("".join, zip(literals, (*chosen, ""), strict=True))))
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    """Returns the numbers of one bracket, with the leading zeros of each range's start."""
    numbers: list[str] = []
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            raise _malformed(text)
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < MOST_HOSTS:
            raise _malformed(text)
        numbers += [f"{number:0{len(found[1])}d}" for number in range(first, last + 1)]
    return numbers


def _malformed(text: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is no list of hosts; one looks like n[01-03,7],login")
