from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchweft.engine.protocol.sessions import Unsent, UnsentMessages


class Wanted(Unsent):
    """A message that is wanted until the test says otherwise."""

    def __init__(self) -> None:
        super().__init__([])
        self.wanted = True

    def is_wanted(self) -> bool:
        return self.wanted


@given(st.lists(st.sampled_from(["keep", "link", "write", "give up", "lose"])))
def test_every_message_is_sent_or_dropped_once_and_in_order(events: list[str]) -> None:
    """A model of the shell: one thread writes the first message, and removes it then."""
    messages, is_linked = UnsentMessages(), False
    made: list[Wanted] = []
    sent: list[Unsent] = []
    dropped: list[Unsent] = []
    for event in events:
        if event == "keep":
            made.append(Wanted())
            if not messages.keep(made[-1], is_linked=is_linked):
                sent.append(made[-1])
        elif event == "link":
            is_linked = True
        elif event == "write" and is_linked and messages:
            sent.append(messages.popleft())
        elif event == "give up" and messages:
            messages[-1].wanted = False  # type: ignore[attr-defined]
            dropped += messages.take_unwanted()
        elif event == "lose":
            dropped += messages.take_all()
    assert sent == [each for each in made if each in sent]
    assert sorted(map(id, [*sent, *dropped, *messages])) == sorted(map(id, made))
