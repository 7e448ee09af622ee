"""Which pages are taken, and by how many: a page allocator on the host, with reference counts for shared prefixes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from m3attn.checks import check_int


class OutOfPages(RuntimeError):
    """More pages were asked for than are free; nothing was allocated. `needed` and `free` hold both numbers."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(f"num_pages: needed {needed} pages, {free} of {total} are free")
        self.needed = needed
        self.free = free


class PageAllocator:
    """Hands out page ids from 0 to num_pages - 1, the one freed longest ago first; a page is free again when its last reference goes.

    Every method either does all that it was asked to or raises and changes nothing.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = check_int("num_pages", num_pages, 1)
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def references(self, page: int) -> int:
        """How many owners a page has; 0: it is free. Raises ValueError for an id out of range."""
        return self._references[self._known("page", page)]

    def alloc(self, num_pages: int) -> list[int]:
        """Ids of `num_pages` pages with one reference each.

        Raises:
            OutOfPages: fewer are free.
        """
        check_int("num_pages", num_pages, 0)
        if num_pages > len(self._free):
            raise OutOfPages(num_pages, len(self._free), self.num_pages)
        pages = [self._free.popleft() for _ in range(num_pages)]
        for page in pages:
            self._references[page] = 1
        return pages

    def fork(self, pages: Sequence[int]) -> list[int]:
        """One more reference to each page, for a request that shares them; returns the ids.

        Raises:
            ValueError: an id out of range, or a page that is free.
        """
        pages = list(pages)
        for index, page in enumerate(pages):
            self._used(f"pages[{index}]", page)
        for page in pages:
            self._references[page] += 1
        return pages

    def free(self, pages: Iterable[int]) -> list[int]:
        """Give back one reference to each page (to a page listed twice, two); returns the ids that became free.

        Raises:
            ValueError: an id out of range, or more references given back than there are (a double free).
        """
        pages = list(pages)
        for index, page in enumerate(pages):
            self._known(f"pages[{index}]", page)
        for page, count in Counter(pages).items():
            if count > self._references[page]:
                raise ValueError(
                    f"pages: expected at most {self._references[page]} references to page {page} to be freed, got {count} (a double free)"
                )
        released = []
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                released.append(page)
        return released

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Hand the references of source[i] to target[i]; the sources that are no targets become free.

        Raises:
            ValueError: lists of different lengths, ids out of range or repeated, a source that is free, or a target that is neither free nor a
                source.
        """
        source, target = list(source), list(target)
        if len(source) != len(target):
            raise ValueError(f"target: expected {len(source)} pages, one for each of source, got {len(target)}")
        for name, pages in (("source", source), ("target", target)):
            repeated = [page for page, count in Counter(pages).items() if count > 1]
            if repeated:
                raise ValueError(f"{name}: expected each page once, got page {repeated[0]} more than once")
        left, taken = set(source), set(target)
        for index, page in enumerate(source):
            self._used(f"source[{index}]", page)
        for index, page in enumerate(target):
            if self._references[self._known(f"target[{index}]", page)] and page not in left:
                raise ValueError(f"target[{index}]: expected a free page or one of source, got page {page}, which is in use")
        moved = {new: self._references[old] for old, new in zip(source, target, strict=True)}
        for page in source:
            self._references[page] = 0
        for page, count in moved.items():
            self._references[page] = count
        self._free = deque(page for page in self._free if page not in taken)
        self._free.extend(page for page in source if page not in taken)

    def _known(self, argument: str, page: int) -> int:
        return check_int(argument, page, 0, self.num_pages - 1)

    def _used(self, argument: str, page: int) -> None:
        if not self._references[self._known(argument, page)]:
            raise ValueError(f"{argument}: expected a page in use, got page {page}, which is free")
