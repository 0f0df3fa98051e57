"""Extents of a pool, against a set of page numbers: no page is owned twice or lost, and free runs are joined."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from draftproof.models.extents import PAGE, Extent, Extents, pages_for

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "extend", "give"]), st.integers(1, 7), st.integers(0, 30)), max_size=60
)


def pages_of(extent):
    return set(range(extent.first, extent.end))


def runs(free):
    """Return the longest runs of consecutive pages in a set."""
    found, rest = [], sorted(free)
    for page in rest:
        if found and found[-1][1] == page:
            found[-1][1] += 1
        else:
            found.append([page, page + 1])
    return [Extent(first, end - first) for first, end in found]


def run_against_sets(make, pages, operations):
    """Apply operations to extents and to a set of free pages; compare them after each."""
    extents, free, owned = make(pages), set(range(pages)), []
    for operation, size, which in operations:
        if operation == "take":
            longest = max((run.pages for run in runs(free)), default=0)
            made = extents.take(size)
            assert (made is None) == (longest < size)
            if made is not None:
                assert made.pages == size
                assert pages_of(made) <= free, "pages that somebody owns"
                [run] = [run for run in runs(free) if pages_of(made) <= pages_of(run)]
                assert run.pages == min(run.pages for run in runs(free) if run.pages >= size), "not the best fit"
                free -= pages_of(made)
                owned.append(made)
        elif operation == "extend" and owned:
            extent = owned[which % len(owned)]
            wanted = set(range(extent.end, extent.end + size))
            made = extents.extend(extent, size)
            assert (made is None) == (not wanted <= free)
            if made is not None:
                assert made == Extent(extent.first, extent.pages + size)
                free -= wanted
                owned[which % len(owned)] = made
        elif operation == "give" and owned:
            extent = owned.pop(which % len(owned))
            extents.give(extent)
            free |= pages_of(extent)
        assert extents.free == runs(free), "free runs in rising order, joined where they touch"
        assert extents.free_pages == len(free)
    for extent in owned:
        extents.give(extent)
    assert extents.free == ([Extent(0, pages)] if pages else [])


@settings(max_examples=200)
@given(pages=st.integers(0, 40), operations=OPERATIONS)
def test_extents_equal_a_set_of_pages(pages, operations):
    run_against_sets(Extents, pages, operations)


class NotJoined(Extents):
    """Forgets to join a freed extent with the run after it."""

    def give(self, extent):
        self._free = sorted([*self._free, extent], key=lambda run: run.first)


class OverlongExtend(Extents):
    """Leaves the last page of an extension free, so that it is owned twice later."""

    def extend(self, extent, pages):
        made = super().extend(extent, pages)
        if made is not None:
            self.give(Extent(made.end - 1, 1))
        return made


@pytest.mark.parametrize("broken", [NotJoined, OverlongExtend])
def test_broken_extents_are_found(broken):
    """A control: the comparison fails if it should."""

    @settings(max_examples=300, database=None, phases=[Phase.generate])
    @given(pages=st.integers(0, 40), operations=OPERATIONS)
    def compared(pages, operations):
        run_against_sets(broken, pages, operations)

    with pytest.raises(AssertionError):
        compared()


@pytest.mark.parametrize("again", [Extent(2, 3), Extent(1, 2), Extent(4, 4), Extent(0, 10)])
def test_a_page_that_is_free_already_cannot_be_freed(again):
    extents = Extents(10)
    whole = extents.take(10)
    assert whole == Extent(0, 10)
    extents.give(Extent(2, 3))
    with pytest.raises(
        ValueError, match=f"pages {again.first} to {again.end - 1} are freed, but some of them are free"
    ):
        extents.give(again)
    assert extents.free == [Extent(2, 3)], "a refused call changes nothing"


def test_an_extent_is_joined_with_the_runs_on_both_sides():
    extents = Extents(9)
    first, middle, last = (extents.take(3) for _ in range(3))
    extents.give(first)
    extents.give(last)
    assert extents.free == [Extent(0, 3), Extent(6, 3)]
    assert extents.take(4) is None, "six pages are free, but no run of four"
    extents.give(middle)
    assert extents.free == [Extent(0, 9)]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_pages_for_tokens(tokens, pages):
    assert pages_for(tokens) == pages
    assert Extent(3, pages).slots >= tokens
    assert Extent(3, pages).start == 3 * PAGE
