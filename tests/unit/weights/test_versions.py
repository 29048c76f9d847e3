"""Versions of weights: which are kept, sent, fetched and taken over."""

from __future__ import annotations

import pytest

from torchweft.weights.versions import Following, Offer, Offers, Version


def version(number: int, publisher: int = 7) -> Version:
    return Version(publisher, number)


def test_numbers_begin_after_the_given_one() -> None:
    offers = Offers(7, 40, 0)
    assert offers.newest is None
    assert offers.fetched(None, is_shared=False) is None
    assert offers.published() == version(41)
    assert offers.fetched(version(41), is_shared=False) is None


def test_without_bases_only_the_newest_is_kept_and_sent_whole() -> None:
    offers = Offers(7, 0, 0)
    for number in (1, 2, 3):
        offers.published()
        assert offers.fetched(version(number - 1), is_shared=False) == Offer(version(number), None)
        assert offers.kept == (number,)


def test_a_version_that_was_sent_as_a_copy_becomes_a_base() -> None:
    offers = Offers(7, 0, 2)
    offers.published()
    assert offers.fetched(None, is_shared=False) == Offer(version(1), None)
    offers.published()
    offers.published()  # Nobody has version 2.
    assert offers.kept == (1, 3)
    assert offers.fetched(version(1), is_shared=False) == Offer(version(3), version(1))
    assert offers.fetched(version(2), is_shared=False) == Offer(version(3), None)
    offers.published()
    assert offers.kept == (1, 3, 4)
    offers.fetched(None, is_shared=False)
    offers.published()
    assert offers.kept == (3, 4, 5)
    assert offers.fetched(version(1), is_shared=False) == Offer(version(5), None)


def test_versions_of_another_publisher_are_no_bases() -> None:
    offers = Offers(7, 0, 2)
    offers.published()
    offers.fetched(None, is_shared=False)
    offers.published()
    assert offers.fetched(version(1, 8), is_shared=False) == Offer(version(2), None)
    assert offers.fetched(version(2, 8), is_shared=False) == Offer(version(2), None)


def test_shared_memory_needs_no_bases() -> None:
    offers = Offers(7, 0, 2)
    offers.published()
    offers.fetched(None, is_shared=True)
    offers.published()
    assert offers.kept == (2,)
    assert offers.fetched(version(1), is_shared=True) == Offer(version(2), None)


def follow() -> Following:
    following = Following()
    following.followed(7)
    return following


def take(following: Following, number: int, *, is_shared: bool = False, base: int = 0) -> None:
    following.fetching()
    offer = Offer(version(number), version(base) if base else None)
    assert following.arrived(offer, is_shared=is_shared)
    following.checked(version(number), is_good=True)


def test_copies_are_fetched_one_ahead() -> None:
    following = follow()
    assert following.announced(version(1))
    following.fetching()
    assert not following.announced(version(2)), "a fetch is under way"
    assert following.arrived(Offer(version(2), None), is_shared=False)
    assert not following.checked(version(2), is_good=True)
    assert not following.announced(version(3)), "version 2 waits to be used"
    assert following.took()
    assert (following.current, following.ready) == (version(2), None)


def test_what_is_shared_is_replaced_while_it_waits() -> None:
    following = follow()
    following.announced(version(1))
    take(following, 1, is_shared=True)
    assert following.announced(version(2))
    take(following, 2, is_shared=True)
    assert following.ready == version(2)
    assert not following.took()


@pytest.mark.parametrize("publisher", [7, 8])
def test_a_delta_against_another_version_is_refused(publisher: int) -> None:
    following = follow()
    following.announced(version(5))
    take(following, 5)
    following.took()
    following.announced(version(9))
    following.fetching()
    base = version(4) if publisher == 7 else version(5, publisher)
    assert not following.arrived(Offer(version(9), base), is_shared=False)
    assert following.is_fetch_due
    assert following.have is None, "whole weights are asked for"
    assert following.current == version(5)


def test_a_damaged_delta_is_followed_by_whole_weights() -> None:
    following = follow()
    following.announced(version(1))
    take(following, 1)
    following.took()
    assert following.have == version(1)
    following.announced(version(2))
    following.fetching()
    assert following.arrived(Offer(version(2), version(1)), is_shared=False)
    assert following.checked(version(2), is_good=False)
    assert following.have is None
    take(following, 2)
    following.took()
    assert following.have == version(2)


def test_a_failed_fetch_is_made_again() -> None:
    following = follow()
    following.announced(version(1))
    following.fetching()
    following.failed()
    assert following.is_fetch_due
    take(following, 1)
    assert not following.is_fetch_due


def test_another_publisher_may_count_from_a_smaller_number() -> None:
    following = follow()
    following.announced(version(60))
    take(following, 60)
    following.took()
    following.followed(8)
    assert following.announced(version(50, 8))
    following.fetching()
    assert following.arrived(Offer(version(50, 8), None), is_shared=False)
    assert not following.checked(version(50, 8), is_good=True)
    following.took()
    assert following.current == version(50, 8)
    assert not following.announced(version(61)), "late, of the former one"


def test_an_answer_without_a_version_waits_for_the_next_announcement() -> None:
    following = follow()
    following.announced(version(1))
    following.fetching()
    assert not following.arrived(None, is_shared=False)
    assert not following.is_fetch_due


def test_an_announcement_that_overtakes_such_an_answer_counts() -> None:
    following = follow()
    following.announced(version(1))
    following.fetching()
    assert not following.announced(version(2))
    assert not following.arrived(None, is_shared=False)
    assert following.is_fetch_due


def test_a_publisher_without_a_version_is_not_asked_again_for_whole_weights() -> None:
    following = follow()
    following.announced(version(1))
    following.fetching()
    assert following.arrived(Offer(version(1), None), is_shared=False)
    assert following.checked(version(1), is_good=False)
    following.fetching()
    assert not following.arrived(None, is_shared=False)
    assert not following.is_fetch_due


def test_an_announcement_that_outruns_the_subscription_counts() -> None:
    following = Following()
    assert not following.announced(version(1))
    assert following.followed(7)


def test_nothing_is_fetched_while_bytes_that_arrived_are_put_in_place() -> None:
    following = follow()
    assert following.announced(version(1))
    following.fetching()
    assert following.arrived(Offer(version(1), None), is_shared=False)
    assert not following.announced(version(2))
    assert not following.checked(version(1), is_good=True)
    assert following.took()
