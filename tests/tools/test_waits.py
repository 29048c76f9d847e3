"""Every wait in the source is in the list of waits, with what ends it and what is told then."""

from __future__ import annotations

import ast
import re
from collections import Counter

from tests.waits.finding import _waits_in, find_waits
from tests.waits.listing import read
from torchweft import errors, knobs

_VARIABLE = re.compile(r"WEFT_[A-Z_]+")
_KNOB = re.compile(r"knobs\.([A-Z_]+)")
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Timeout|Lost|Full)\b")


def test_every_wait_is_in_the_list_and_the_list_has_no_other() -> None:
    listed = Counter(place for section in read() for place in section.places)
    found = find_waits()
    assert [place for place, count in listed.items() if count > 1] == []
    missing = {place: names for place, names in found.items() if place not in listed}
    assert not missing, "give these waits a limit and an error, and put them into the list"
    assert set(listed) - set(found) == set(), "these wait no more: take them out of the list"


def test_each_section_says_what_ends_its_waits_and_what_is_told() -> None:
    for section in read():
        assert section.ends, section.title
        assert section.told, section.title
        assert section.places, section.title


def test_the_variables_and_errors_of_the_list_exist() -> None:
    text = " ".join(f"{section.ends} {section.told}" for section in read())
    variables = {each.variable for each in vars(knobs).values() if hasattr(each, "variable")}
    assert set(_VARIABLE.findall(text)) - variables == set()
    assert {name for name in _KNOB.findall(text) if not hasattr(knobs, name)} == set()
    names = set(_ERROR.findall(text)) - {"AssertionError"}
    assert {name for name in names if not hasattr(errors, name)} == set()


WAITING = """
def direct(event, thread, process, store, lock, jobs):
    event.wait()
    thread.join(3)
    process.communicate()
    store.wait(["key"])
    lock.acquire(timeout=3)
    taken.extend(map(lock.acquire, (True,), (3,)))
    jobs.get()
    jobs.get(timeout=3)

class Holder:
    def method(self):
        def inner():
            time.sleep(1)
        subprocess.run(["true"])
        return inner
"""

PLAIN = """
def nothing(lock, process, path, found, knobs, names):
    with lock:
        pass
    lock.acquire(False)
    lock.acquire(blocking=False)
    process.poll()
    poller.poll(0)
    os.path.join("a", "b")
    ", ".join(names)
    bytearray().join(names)
    found.get("key")
    knobs.LIMIT.get()
    current_call.get()
"""


def test_waits_are_found_and_other_calls_are_not() -> None:
    assert Counter(_waits_in(ast.parse(WAITING), ())) == {
        ("direct", "wait"): 2,
        ("direct", "join"): 1,
        ("direct", "communicate"): 1,
        ("direct", "acquire"): 2,
        ("direct", "get"): 2,
        ("Holder.method.inner", "sleep"): 1,
        ("Holder.method", "subprocess.run"): 1,
    }
    assert list(_waits_in(ast.parse(PLAIN), ())) == []
